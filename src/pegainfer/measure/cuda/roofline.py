"""The card's ceilings, against which shares of the roofline are measured."""

from __future__ import annotations

from pegainfer.lower.cuda.bind import Matmul
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.store import fill_normal
from pegainfer.measure.cuda.timing import graph_times
from pegainfer.measure.ledger import Roofline
from pegainfer.runtime.cuda.cublaslt import MatmulProblem
from pegainfer.runtime.cuda.launch import Launch, i64, ptr
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.tensor import DeviceTensor

BYTES = 1 << 30  # many times any cache
BLOCKS_PER_SM = (2, 4, 8)
RUNS = 5
SWEEPS = 16  # of the part that the L2 cache holds, one launch each
LAUNCHES = 256  # that do nothing
PEAKS = {"bf16": 8192, "f32": 4096}  # dtype -> rows, columns and depth of the timed GEMM


def read_gb_s(ctx: CudaContext, nbytes: int = BYTES, sweeps: int = 1) -> float:
    """Best GB/s (10⁹ bytes) of some launches that only read, `sweeps` of them in a graph."""
    data, out = DeviceBuffer(nbytes, "bandwidth"), DeviceBuffer(4, "bandwidth's result")
    fill_normal(ctx, DeviceTensor.at(data.address, (nbytes // 2,), "bf16"), seed=1)
    args = (ptr(data.address), ptr(out.address), i64(nbytes // 16))
    best = 0.0
    for per_sm in BLOCKS_PER_SM:
        grid = (per_sm * ctx.device.info.num_sms, 1, 1)
        launch = Launch(ctx.library.kernel("read_bandwidth"), grid, 512, args, label="read_bandwidth")
        times = graph_times(ctx, [launch] * sweeps, RUNS, "read_bandwidth")
        best = max(best, sweeps * nbytes / min(times) / 1e3)
    data.free()
    out.free()
    return best


def gflop_s(ctx: CudaContext, dtype: str, size: int) -> float:
    """Best 10⁹ multiplications and additions a second of a square GEMM of random numbers by cuBLASLt."""
    shape = (size, size)
    x, w, out = (DeviceTensor.empty(shape, dtype, "operand of the peak") for _ in range(3))
    for seed, t in enumerate((x, w)):
        fill_normal(ctx, t, seed)
    plan = ctx.lt.plan(MatmulProblem(size, size, size, dtype, dtype))
    plan.tune(x.address, w.address, out.address, ctx.stream, ctx.flush)
    work = Matmul(plan, x.address, w.address, out.address)
    return float(2 * size**3 / min(graph_times(ctx, [work], RUNS, f"peak of {dtype}")) / 1e3)


def launch_us(ctx: CudaContext) -> float:
    """Least microseconds of a launch among others in a graph, each let in while the one before it ends."""
    kernel = ctx.library.kernel("launch_nothing")
    launch = Launch(kernel, (1, 1, 1), 32, (), pdl=ctx.device.info.pdl, label="launch_nothing")
    return min(graph_times(ctx, [launch] * LAUNCHES, RUNS, "launches of nothing")) / LAUNCHES


def measure_roofline(ctx: CudaContext) -> Roofline:
    """Bandwidths of memory and L2 cache, peaks of the tensor cores in bf16 and f32, a launch (0.1 s)."""
    return Roofline(
        read_gb_s=read_gb_s(ctx),
        cache_gb_s=read_gb_s(ctx, ctx.device.info.l2_bytes // 32 * 16, SWEEPS),
        peaks={dtype: gflop_s(ctx, dtype, size) for dtype, size in PEAKS.items()},
        launch_us=launch_us(ctx),
    )
