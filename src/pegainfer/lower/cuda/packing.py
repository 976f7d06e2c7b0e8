"""Quantised weights on their way into packed forms: blocks of their files, put into tiles on the device."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runtime.cuda.arguments import PACK
from pegainfer.runtime.cuda.launch import Launch, packed_struct
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.packed import COLUMNS, PackedForm
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.upload import SLOT_BYTES, WorkItem
from pegainfer.runtime.weights.formats import FORMATS
from pegainfer.runtime.weights.weight import VALUES, Weight

Array = np.ndarray[Any, Any]
BLOCKS, THREADS = 1024, 256


class PackedTarget(NamedTuple):
    """Where one matrix goes.

    Args:
        address: of the packed matrix, which may hold others.
        first: its row where this one begins; of pairs, 1 for the second.
    """

    name: str
    shape: tuple[int, ...]
    form: PackedForm
    address: int
    first: int
    pairs: bool

    @property
    def dtype(self) -> str:
        """For errors."""
        return self.form.name


def packed_items(
    weight: Weight, target: PackedTarget, ctx: CudaContext, buffer: DeviceBuffer
) -> list[WorkItem]:
    """The work items that bring a matrix to the device: whole rows in the blocks of its format.

    Args:
        buffer: of at least a slot of the ring. Work of one stream is in order, so it serves all work items.
    """
    block = FORMATS[weight.dtype]
    row_bytes = block.nbytes(target.shape[1])
    # A scheme may store several rows together.
    each = SLOT_BYTES // row_bytes // weight.scheme.multiple("N") * weight.scheme.multiple("N")
    if not each:
        raise OpError(f"rows of weight {target.name} are too long", expected=SLOT_BYTES, got=row_bytes)
    rows, items = target.shape[0], []
    for first in range(0, rows, each):
        count = min(each, rows - first)
        read, send = _reader(weight, first, count), _sender(weight.dtype, target, first, count, ctx, buffer)
        items.append(WorkItem(count * row_bytes, read, send, target.name))
    return items


def _reader(weight: Weight, first: int, count: int) -> Callable[[Array], None]:
    def read(into: Array) -> None:
        weight.take(0, [range(first, first + count)]).in_form().parts[VALUES].read(into)

    return read


def _sender(
    format_name: str, target: PackedTarget, first: int, count: int, ctx: CudaContext, buffer: DeviceBuffer
) -> Callable[[int, Stream], None]:
    row_bytes = FORMATS[format_name].nbytes(target.shape[1])

    def send(host: int, stream: Stream) -> None:
        stream.upload(buffer.address, host, count * row_bytes)
        _launch(ctx, f"pack_{format_name}", target, stream, buffer.address, row_bytes, count, first)

    return send


def make_up(ctx: CudaContext, target: PackedTarget, seed: int, peak: float, stream: Stream) -> None:
    """Seeded levels of uniform distribution, whose values have the size of other made up weights."""
    levels = 16 if target.form.bits == 4 else 32 if target.form.offset else 256
    scale = target.shape[1] ** -0.5 * peak / sqrt((levels**2 - 1) / 12)
    kernel = f"make_up_{target.form.name}"
    _launch(ctx, kernel, target, stream, 0, 0, target.shape[0], 0, seed=seed, scale=scale)


def _launch(
    ctx: CudaContext,
    kernel: str,
    target: PackedTarget,
    stream: Stream,
    source: int,
    row_bytes: int,
    rows: int,
    row: int,
    *,
    seed: int = 0,
    scale: float = 0.0,
) -> None:
    k = target.shape[1]
    members = {
        "out": target.address, "in": source, "row_bytes": row_bytes, "seed": seed, "rows": rows, "k": k,
        "across": -(-k // COLUMNS), "row": row, "first": target.first, "pairs": int(target.pairs),
        "scale": scale,
    }  # fmt: skip
    args = [packed_struct(PACK.kinds, PACK.values(members))]
    Launch(ctx.library.kernel(kernel), (BLOCKS, 1, 1), THREADS, args, label=kernel)(stream)
