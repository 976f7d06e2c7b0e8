"""What this card's memory can give: the roof that shares are measured against."""

from __future__ import annotations

from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.runtime.cuda.launch import Launch, i64, ptr
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.stream import Event

BYTES = 1 << 30  # many times any cache
BLOCKS_PER_SM = 4
RUNS = 5


def read_gb_s(ctx: CudaContext) -> float:
    """Best GB/s (10⁹ bytes) of some sweeps that only read."""
    data, out = DeviceBuffer(BYTES, "bandwidth"), DeviceBuffer(4, "bandwidth's result")
    grid = (BLOCKS_PER_SM * ctx.device.info.num_sms, 1, 1)
    args = (ptr(data.address), ptr(out.address), i64(BYTES // 16))
    launch = Launch(ctx.library.kernel("read_bandwidth"), grid, 512, args, label="read_bandwidth")
    ctx.stream.fill(data.address, 0, BYTES)
    best = 0.0
    for _ in range(RUNS):
        start, stop = Event(timing=True), Event(timing=True)
        start.record(ctx.stream)
        launch(ctx.stream)
        stop.record(ctx.stream)
        stop.wait("read_bandwidth")
        best = max(best, BYTES / stop.milliseconds_since(start) / 1e6)
    return best
