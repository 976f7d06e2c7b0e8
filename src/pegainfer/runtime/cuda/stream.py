"""Streams and events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from pegainfer.runtime.cuda.driver import bindings, call, fail


class Event:
    """A point in a stream's work. `timing=False` is cheaper and the default."""

    def __init__(self, timing: bool = False) -> None:
        flags = bindings().CUevent_flags
        chosen = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        self.handle = call("cuEventCreate", int(chosen))
        d = bindings()  # every step asks events: no lookup then
        self._record, self._query = d.cuEventRecord, d.cuEventQuery
        self._synchronize, self._elapsed = d.cuEventSynchronize, d.cuEventElapsedTime

    def record(self, stream: Stream) -> None:
        result = self._record(self.handle, stream.handle)
        if result[0]:
            fail("cuEventRecord", result[0])

    def done(self) -> bool:
        """Whether the work before it has ended. Raises what that work raised."""
        code = self._query(self.handle)[0]
        if code and code.name != "CUDA_ERROR_NOT_READY":
            fail("cuEventQuery", code)
        return not code

    def wait(self, where: object = None) -> None:
        """Blocks this thread until the work before it has ended."""
        result = self._synchronize(self.handle)
        if result[0]:
            fail("cuEventSynchronize", result[0], where)

    def milliseconds_since(self, start: Event) -> float:
        """Device time between two events made with `timing`; both must have ended."""
        result = self._elapsed(start.handle, self.handle)
        if result[0]:
            fail("cuEventElapsedTime", result[0])
        return float(result[1])


class Stream:
    """Work in order. Copies below are asynchronous: host memory must be pinned and live until they end."""

    def __init__(self) -> None:
        self.handle = call("cuStreamCreate", int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.cold_seconds = 0.0  # of the host, making graphs and what they hold
        self._upload, self._download = bindings().cuMemcpyHtoDAsync, bindings().cuMemcpyDtoHAsync

    @contextlib.contextmanager
    def cold(self) -> Iterator[None]:
        """Counts the time of the context, which makes something ready that steps need; contexts may nest."""
        began, before = time.perf_counter(), self.cold_seconds
        yield
        self.cold_seconds = before + time.perf_counter() - began

    def upload(self, device: int, host: int, nbytes: int, where: object = None) -> None:
        """Host address to device address."""
        if nbytes:
            result = self._upload(device, host, nbytes, self.handle)
            if result[0]:
                fail("cuMemcpyHtoDAsync", result[0], where)

    def download(self, host: int, device: int, nbytes: int, where: object = None) -> None:
        """Device address to host address."""
        if nbytes:
            result = self._download(host, device, nbytes, self.handle)
            if result[0]:
                fail("cuMemcpyDtoHAsync", result[0], where)

    def copy(self, dst: int, src: int, nbytes: int, where: object = None) -> None:
        """Device to device."""
        if nbytes:
            call("cuMemcpyDtoDAsync", dst, src, nbytes, self.handle, where=where)

    def copy_rows(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, *, host: bool = False
    ) -> None:
        """`rows` rows of `width` bytes to the device, with a pitch in bytes on either side.

        Args:
            host: whether `src` is a host address.
        """
        if not width * rows:
            return
        d = bindings()
        kinds = d.CUmemorytype
        spec = d.CUDA_MEMCPY2D()
        spec.dstMemoryType, spec.dstDevice, spec.dstPitch = kinds.CU_MEMORYTYPE_DEVICE, dst, dst_pitch
        spec.srcPitch = src_pitch
        if host:
            spec.srcMemoryType, spec.srcHost = kinds.CU_MEMORYTYPE_HOST, src
        else:
            spec.srcMemoryType, spec.srcDevice = kinds.CU_MEMORYTYPE_DEVICE, src
        spec.WidthInBytes, spec.Height = width, rows
        call("cuMemcpy2DAsync", spec, self.handle, where=f"{rows} rows of {width} bytes")

    def fill(self, device: int, byte: int, nbytes: int) -> None:
        if nbytes:
            call("cuMemsetD8Async", device, byte, nbytes, self.handle)

    def synchronize(self, where: object = None) -> None:
        """Blocks this thread. An error of an earlier kernel shows here; `where` names the step."""
        call("cuStreamSynchronize", self.handle, where=where)

    def done(self) -> bool:
        code = bindings().cuStreamQuery(self.handle)[0]
        if code and code.name != "CUDA_ERROR_NOT_READY":
            fail("cuStreamQuery", code)
        return not code


def elapsed(stream: Stream, start: Event, work: Any) -> float:
    """Milliseconds of device time that `work()` takes on the stream."""
    start.record(stream)
    work()
    stop = Event(timing=True)
    stop.record(stream)
    stop.wait()
    return stop.milliseconds_since(start)
