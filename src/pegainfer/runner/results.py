"""What a step drew, on its way from the device to the host without anybody waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pegainfer.runtime.cuda.memory import PinnedBuffer, aligned
from pegainfer.runtime.cuda.stream import Event, Stream
from pegainfer.runtime.cuda.tensor import NUMPY, DeviceTensor

Array = np.ndarray[Any, Any]
DRAWN = {"tokens": "i32", "status": "i32"}
ASKED = {"ranks": "i32", "logprobs": "f32", "top_ids": "i32", "top_logprobs": "f32"}  # the last two [L, K]
WIDE = ("top_ids", "top_logprobs")


class ResultBuffer:
    """Pinned memory for the results of at most `rows` rows, and the events around them."""

    def __init__(self, rows: int, top: int) -> None:
        """`top`: alternatives a row, K."""
        self._top = top
        self._offsets: dict[str, int] = {}
        end = 0
        for name in (*DRAWN, *ASKED):
            self._offsets[name] = end
            end = aligned(end + 4 * rows * (top if name in WIDE else 1))
        self._memory = PinnedBuffer(max(1, end), "results")
        self.began, self.ended = Event(timing=True), Event(timing=True)

    def fetch(self, outputs: Mapping[str, DeviceTensor], names: Iterable[str], stream: Stream) -> None:
        """Puts the copies on the stream."""
        for name in names:
            t = outputs[name]
            stream.download(self._memory.address + self._offsets[name], t.address, t.nbytes, name)

    def arrays(self, rows: int, asked: bool) -> dict[str, Array]:
        """Copies of what has come; ranks are 0 where nothing was asked for."""
        found = {name: self._view(name, rows) for name in DRAWN}
        if asked:
            return found | {name: self._view(name, rows) for name in ASKED}
        return found | {"ranks": np.zeros(rows, np.int32)}

    def _view(self, name: str, rows: int) -> Array:
        dtype = NUMPY[DRAWN.get(name) or ASKED[name]]
        shape = (rows, self._top) if name in WIDE else (rows,)
        start = self._offsets[name]
        data = self._memory.bytes[start : start + 4 * int(np.prod(shape))]
        held: Array = data.view(dtype).reshape(shape).copy()
        return held
