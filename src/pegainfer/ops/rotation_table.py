"""The rotation's table as a weight whose rows are computed where they are read.

A table of 262,144 positions takes 268 MB and half a second. A GPU's upload reads it in parts, so that the
host never holds it and the threads of the upload share the work.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pegainfer.ops.rope import cos_sin_rows
from pegainfer.runtime.weights.part import Part
from pegainfer.runtime.weights.weight import VALUES, Weight, plain

if TYPE_CHECKING:
    from pegainfer.runtime.weights.part import Bytes, Extent

Array = np.ndarray[Any, Any]


def rotation_table(num_positions: int, freqs: Array, factor: float = 1.0, head_dim: int = 0) -> Weight:
    """[P, D] f32: cosines of each pair, then sines.

    Args:
        freqs: angular frequency of the pairs that are rotated, radians a token.
        factor: `attention_factor` of the scaling.
        head_dim: D; pairs beyond those of `freqs` have cosine 1 and sine 0. 0: twice the frequencies.
    """
    width = head_dim or 2 * len(freqs)
    source = _Rows(num_positions, freqs, factor, width)
    return Weight(
        plain("f32"), (num_positions, width), {VALUES: Part.at("f32", (num_positions, width), source, 0)}
    )


class _Rows(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Implements runtime.weights.part.Source."""

    num_positions: int
    freqs: Array
    factor: float
    width: int  # floats of a row

    @property
    def size(self) -> int:
        return 4 * self.num_positions * self.width

    @cached_property
    def _whole(self) -> Bytes:
        return self._computed(range(self.num_positions)).reshape(-1)

    def view(self) -> Bytes:
        return self._whole

    def read(self, extent: Extent, into: Bytes) -> None:
        first, left = divmod(extent.offset, 4 * self.width)
        step, uneven = divmod(extent.pitch, 4 * self.width)
        if uneven or left + extent.width > 4 * self.width:  # no part of a table is cut so
            into.reshape(extent.rows, extent.width)[...] = extent.mapped()
            return
        rows = self._computed(range(first, first + max(step, 1) * extent.rows, max(step, 1)))
        into.reshape(extent.rows, extent.width)[...] = rows[:, left : left + extent.width]

    def forget(self, extent: Extent) -> None:
        """Only what `view` was asked for is held."""

    def _computed(self, positions: range) -> Bytes:
        """[positions, 4 D] uint8."""
        table = cos_sin_rows(
            np.arange(positions.start, positions.stop, positions.step), self.freqs, self.factor
        )
        pairs, half = len(self.freqs), self.width // 2
        if pairs < half:
            rotated, table = table, np.zeros((len(table), self.width), np.float32)
            table[:, :pairs], table[:, pairs:half] = rotated[:, :pairs], 1
            table[:, half : half + pairs] = rotated[:, pairs:]
        return table.view(np.uint8)
