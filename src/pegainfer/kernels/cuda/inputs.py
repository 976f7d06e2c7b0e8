"""Step inputs on their way to the device: packed into one pinned slot, padded, sent as one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.ops.tensor import Sizes, Tensor
from pegainfer.runtime.cuda.memory import DeviceBuffer, StagingRing, aligned
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import NUMPY, encode

Array = np.ndarray[Any, Any]
SLOTS = 4  # pinned: two plans in flight, one being filled, one to spare
ALIGN = 64  # bytes


@dataclass
class Layout:
    """Where the inputs of a step of certain sizes lie.

    Args:
        offsets: from the start of the slot and of the device memory alike.
        memory: on the device; launches point into it.
    """

    env: Mapping[str, int]
    offsets: dict[Tensor, int]
    nbytes: int
    memory: DeviceBuffer
    places: dict[tuple[int, int], dict[str, Array]] = field(default_factory=dict)  # by ring and slot

    def address(self, t: Tensor) -> int:
        return self.memory.address + self.offsets[t]


class InputStage:
    """The inputs of one program. Device memory grows with the layouts asked for; older ones keep theirs."""

    def __init__(self, name: str, inputs: Iterable[Tensor], padding: Mapping[str, int]) -> None:
        """`padding`: what lies behind an input's own values in a larger layout, by name; 0 for others."""
        self._name = name
        self._inputs = {t.name: t for t in inputs}
        self._padding = padding
        self._memory = DeviceBuffer(0, "step inputs")
        self._rings: list[StagingRing] = []  # the last one is in use; copies may still read the others

    def layout(self, env: Mapping[str, int]) -> Layout:
        offsets: dict[Tensor, int] = {}
        end = 0
        for t in self._inputs.values():
            offsets[t] = end
            end = -(-(end + t.nbytes(env)) // ALIGN) * ALIGN
        if end > self._memory.nbytes:
            self._memory = DeviceBuffer(aligned(end), "step inputs")
        return Layout(dict(env), offsets, end, self._memory)

    def send(self, layout: Layout, inputs: Mapping[str, Array], env: Sizes, stream: Stream) -> None:
        """Raises OpError for an input that is missing or not of the shape that `env` gives it."""
        if layout.nbytes == 0:
            return
        if not self._rings or self._rings[-1].slot_bytes < layout.nbytes:
            self._rings.append(StagingRing(SLOTS, aligned(layout.nbytes), "step inputs"))
        ring = self._rings[-1]
        slot, host, data = ring.take()
        key = len(self._rings), slot
        places = layout.places.get(key)
        if places is None:
            places = layout.places[key] = {
                t.name: data[at : at + t.nbytes(layout.env)].view(NUMPY[t.dtype]).reshape(t.sizes(layout.env))
                for t, at in layout.offsets.items()
            }
        for name, place in places.items():
            self._put(name, place, inputs.get(name), self._inputs[name].sizes(env))
        stream.upload(layout.memory.address, host, layout.nbytes, "step inputs")
        ring.sent(stream)

    def _put(self, name: str, place: Array, array: Array | None, shape: tuple[int, ...]) -> None:
        if array is None or array.shape != shape:
            raise OpError(
                f"program {self._name}: input {name}",
                expected=shape, got="nothing" if array is None else array.shape,
            )  # fmt: skip
        if shape != place.shape:
            place[...] = self._padding.get(name, 0)
            place = place[tuple(map(slice, shape))]
        place[...] = encode(array, "bf16") if place.dtype == np.uint16 else array
