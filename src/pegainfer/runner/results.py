"""What a step drew, on its way from the device to the host without anybody waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.runtime.cuda.memory import PinnedBuffer, aligned
from pegainfer.runtime.cuda.stream import Event, Stream
from pegainfer.runtime.cuda.tensor import NUMPY, DeviceTensor, decode

Array = np.ndarray[Any, Any]
DRAWN = {"tokens": "i32", "status": "i32"}
ASKED = {"ranks": "i32", "logprobs": "f32", "top_ids": "i32", "top_logprobs": "f32"}  # the last two [L, K]
WIDE = ("top_ids", "top_logprobs")


RING = 4  # steps whose draws lie in a DrawnRing: two in flight, one being read, one to spare


class DrawnRing:
    """Pinned memory that captured steps write what they draw to, slot after slot: tokens, then statuses."""

    def __init__(self, rows: int) -> None:
        self._memory = PinnedBuffer(RING * 2 * 4 * rows, "drawn tokens")
        self._words = self._memory.bytes.data.cast("i")
        self._rows = rows
        self.place = self._memory.address, RING, rows  # as ResidentState.publish takes it
        self._next = 0

    def take(self) -> int:
        """The slot of the next step that is launched."""
        slot, self._next = self._next, (self._next + 1) % RING
        return slot

    def tokens(self, slot: int, rows: int) -> list[int] | None:
        """What a step that has ended drew; None where a row has a status: `arrays` says which."""
        first = 2 * slot * self._rows
        status = first + self._rows
        if any(self._words[status : status + rows].tobytes()):
            return None
        return self._words[first : first + rows].tolist()

    def arrays(self, slot: int, rows: int) -> dict[str, Array]:
        """As ResultBuffer.arrays, of a step that has ended and that asked for nothing."""
        words = np.frombuffer(self._words, np.int32).reshape(RING, 2, self._rows)
        tokens, status = words[slot, :, :rows].copy()
        return {"tokens": tokens, "status": status, "ranks": np.zeros(rows, np.int32)}


class ResultBuffer:
    """Pinned memory for the results of at most `rows` rows, and the events around them."""

    def __init__(self, rows: int, top: int) -> None:
        """`top`: alternatives a row, K."""
        self._top = top
        self._offsets: dict[str, int] = {}  # of what was fetched last
        self._last: tuple[object, object, int, int] = (None, None, 0, 0)  # outputs, names, address, bytes
        needed = sum(aligned(4 * rows * (top if name in WIDE else 1)) for name in (*DRAWN, *ASKED))
        self._memory = PinnedBuffer(max(1, needed), "results")
        self.began, self.ended = Event(timing=True), Event(timing=True)

    def fetch(self, outputs: Mapping[str, DeviceTensor], names: tuple[str, ...], stream: Stream) -> None:
        """Puts the copies on the stream: one, where the outputs lie close together, as a program's do."""
        if self._last[0] is outputs and self._last[1] == names:
            stream.download(self._memory.address, self._last[2], self._last[3], "results")
            return
        wanted = {name: outputs[name] for name in names}
        first = min([t.address for t in wanted.values()])
        span = max([t.address + t.nbytes for t in wanted.values()]) - first
        if span <= self._memory.nbytes:
            self._offsets = {name: t.address - first for name, t in wanted.items()}
            self._last = outputs, names, first, span
            stream.download(self._memory.address, first, span, "results")
            return
        self._last, self._offsets, end = (None, None, 0, 0), {}, 0
        for name, t in wanted.items():
            self._offsets[name] = end
            stream.download(self._memory.address + end, t.address, t.nbytes, name)
            end += aligned(t.nbytes)

    def arrays(self, rows: int) -> dict[str, Array]:
        """Copies of what has come; ranks are 0 where nothing was asked for."""
        found = {name: self._view(name, rows) for name in self._offsets}
        return found if "ranks" in found else found | {"ranks": np.zeros(rows, np.int32)}

    def _view(self, name: str, rows: int) -> Array:
        dtype = NUMPY[DRAWN.get(name) or ASKED[name]]
        shape = (rows, self._top) if name in WIDE else (rows,)
        start = self._offsets[name]
        data = self._memory.bytes[start : start + 4 * int(np.prod(shape))]
        held: Array = data.view(dtype).reshape(shape).copy()
        return held


class HiddenBuffer:
    """Pinned memory for the hidden states of one part of a prompt."""

    def __init__(self, largest: DeviceTensor) -> None:
        """`largest`: [L, M], the most that is fetched."""
        self._dtype, self._width = largest.dtype, largest.shape[1]
        self._memory = PinnedBuffer(largest.nbytes, "hidden states")

    def fetch(self, hidden: DeviceTensor, stream: Stream) -> None:
        """Puts the copy on the stream."""
        stream.download(self._memory.address, hidden.address, hidden.nbytes, "hidden states")

    def array(self, rows: int) -> Array:
        """A copy of what has come, [rows, M] float32."""
        held = self._memory.bytes.view(NUMPY[self._dtype])[: rows * self._width]
        return np.array(decode(held.reshape(rows, self._width), self._dtype), np.float32)
