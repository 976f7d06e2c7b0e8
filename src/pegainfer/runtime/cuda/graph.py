"""CUDA graphs: a step's launches recorded once and replayed with one call."""

from __future__ import annotations

import time
from collections.abc import Callable

from pegainfer.runtime.cuda.driver import CudaError, bindings, call, fail
from pegainfer.runtime.cuda.stream import Stream


class Graph:
    """An executable graph. Addresses and sizes in it are those at the time of capture."""

    def __init__(self, stream: Stream, body: Callable[[], None], where: str) -> None:
        """Records what `body` puts on the stream; nothing of it runs. Raises what `body` raises."""
        d, began = bindings(), time.perf_counter()
        self.where = where
        relaxed = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED  # cuBLAS may allocate in its warm-up
        call("cuStreamBeginCapture", stream.handle, relaxed, where=where)
        try:
            body()
        except BaseException:
            unfinished = d.cuStreamEndCapture(stream.handle)
            if not unfinished[0]:
                d.cuGraphDestroy(unfinished[1])
            raise
        graph = call("cuStreamEndCapture", stream.handle, where=where)
        try:
            # With no room given, only the count is filled.
            self.nodes = int(call("cuGraphGetNodes", graph)[1])
            if self.nodes == 0:
                raise CudaError("a graph without work was captured", where=where)
            self._exec = call("cuGraphInstantiate", graph, 0, where=f"{where}, {self.nodes} nodes")
        finally:
            call("cuGraphDestroy", graph)
        self._launch = d.cuGraphLaunch
        stream.cold_seconds += time.perf_counter() - began

    def upload(self, stream: Stream) -> None:
        """Moves the graph to the device now rather than at its first launch."""
        call("cuGraphUpload", self._exec, stream.handle, where=self.where)

    def launch(self, stream: Stream) -> None:
        result = self._launch(self._exec, stream.handle)
        if result[0]:
            fail("cuGraphLaunch", result[0], self.where)

    def close(self) -> None:
        if self._exec is not None:
            call("cuGraphExecDestroy", self._exec)
            self._exec = None
