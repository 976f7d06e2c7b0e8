"""Step inputs on their way to the device: packed into one pinned slot, padded, sent as one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
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

    def address(self, t: Tensor) -> int:
        return self.memory.address + self.offsets[t]


@dataclass(frozen=True)
class _Filled:
    """The layout that a slot of the ring was last filled with: where each input's values go, followed by
    padding.

    Args:
        sizes: the step's own, in the order of InputStage's symbols.
        places: name, view of the slot in the shape of those sizes; inputs without elements are left out.
        empty: names and shapes of those.
    """

    layout: Layout
    sizes: tuple[int, ...]
    places: list[tuple[str, Array]]
    empty: list[tuple[str, tuple[int, ...]]]


class InputStage:
    """The inputs of one program. Device memory grows with the layouts asked for; older ones keep theirs."""

    def __init__(self, name: str, inputs: Iterable[Tensor], padding: Mapping[str, int]) -> None:
        """`padding`: what lies behind an input's own values in a larger layout, by name without the KV group
        in front of it; 0 for others."""
        self._name = name
        self._inputs = {t.name: t for t in inputs}
        self._symbols = sorted({d for t in self._inputs.values() for d in t.shape if isinstance(d, str)})
        self._padding = padding
        self._memory = DeviceBuffer(0, "step inputs")
        self._ring: StagingRing | None = None
        self._filled: dict[int, _Filled] = {}  # by slot of that one
        self._outgrown: list[StagingRing] = []  # copies may still read these

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
        if self._outgrown:
            self._free_outgrown()
        ring = self._ring
        if ring is None or ring.slot_bytes < layout.nbytes:
            ring = self._grown(layout.nbytes)
        slot, host, data = ring.take()
        sizes = tuple([env[s] for s in self._symbols])
        filled = self._filled.get(slot)
        if filled is None or filled.layout is not layout or filled.sizes != sizes:
            filled = self._filled[slot] = self._prepared(layout, sizes, data)
        for name, shape in filled.empty:
            self._given(inputs, name, shape)
        for name, place in filled.places:
            array = self._given(inputs, name, place.shape)
            place[...] = encode(array, "bf16") if place.dtype == np.uint16 else array
        stream.upload(layout.memory.address, host, layout.nbytes, "step inputs")
        ring.sent(stream)

    def send_padding(self, layout: Layout, stream: Stream) -> None:
        """Inputs of a step of nobody."""
        nothing = dict.fromkeys(self._symbols, 0)
        inputs = {name: np.zeros(t.sizes(nothing), NUMPY[t.dtype]) for name, t in self._inputs.items()}
        self.send(layout, inputs, nothing, stream)

    def _grown(self, nbytes: int) -> StagingRing:
        """A ring of slots of so many bytes in place of the one before, which is freed once it is idle."""
        self._filled.clear()
        if self._ring is not None:
            self._outgrown.append(self._ring)
            self._ring = None
            self._free_outgrown()
        self._ring = StagingRing(SLOTS, aligned(nbytes), "step inputs")
        return self._ring

    def _free_outgrown(self) -> None:
        busy: list[StagingRing] = []
        for ring in self._outgrown:
            if ring.idle():
                ring.free()
            else:
                busy.append(ring)
        self._outgrown = busy

    def _prepared(self, layout: Layout, sizes: tuple[int, ...], data: Array) -> _Filled:
        """Writes a slot's padding. It stays while the slot is filled in the same way."""
        env = dict(zip(self._symbols, sizes, strict=True))
        places: list[tuple[str, Array]] = []
        empty: list[tuple[str, tuple[int, ...]]] = []
        for t, at in layout.offsets.items():
            shape, room = t.sizes(env), t.sizes(layout.env)
            place = data[at : at + t.nbytes(layout.env)].view(NUMPY[t.dtype]).reshape(room)
            if shape != room:
                place[...] = self._padding.get(t.name.rpartition(".")[2], 0)
                place = place[tuple(map(slice, shape))]
            if place.size:
                places.append((t.name, place))
            else:
                empty.append((t.name, shape))
        return _Filled(layout, sizes, places, empty)

    def _given(self, inputs: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
        array = inputs.get(name)
        if array is None or array.shape != shape:
            raise OpError(
                f"program {self._name}: input {name}",
                expected=shape, got="nothing" if array is None else array.shape,
            )  # fmt: skip
        return array
