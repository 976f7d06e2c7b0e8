"""Which launch of the streaming product is quickest at the decode shapes of Qwen3-4B, on this GPU.

    python bench/cuda_gemm_sweep.py [--rows 1 8 16]

Every candidate runs as a graph of 36 launches over as many different weights (so that caches are cold), each
allowed to start while the one before it ends, as in a model. Prints the chooser's pick beside the best.
"""

from __future__ import annotations

import argparse
from itertools import product

from cuda_decode import graph_ms, normal, read_bandwidth

from pegainfer.lower.cuda.bind import Binder, Memory
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.gemm import GemmProblem, StreamChoice, choose_stream, stream, stream_choice
from pegainfer.lower.cuda.lowering import LoweringContext, Step
from pegainfer.lower.cuda.plan import Place, Planned, StepMemory, StepPlan
from pegainfer.lower.cuda.store import WeightStore
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.program import Builder
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.tensor import DeviceTensor

LAYERS = 36
SHAPES = (  # name, n, k, out, norm
    ("qkv", 6144, 2560, "store", True),
    ("o", 2560, 4096, "residual", False),
    ("gate_up", 19456, 2560, "swiglu", True),
    ("down", 2560, 9728, "residual", False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s")
    largest = max(n * k for _, n, k, _, _ in SHAPES)
    weights = DeviceBuffer(2 * LAYERS * largest, "weights")
    x, out, norm = (DeviceBuffer(n, "operand") for n in (16 * 9728 * 2, 16 * 19456 * 4, 4 * 9728))
    for buffer in (weights, x, norm):
        normal(ctx, DeviceTensor.at(buffer.address, (buffer.nbytes // 2,), "bf16"))
    scratch = DeviceBuffer(1 << 26, "scratch")
    places = {"weights": weights.address, "x": x.address, "out": out.address, "norm": norm.address}
    binder = Binder(
        ctx, WeightStore(ctx, {}), Memory(lambda t: 0, scratch.address, places.__getitem__), tune=False
    )
    for (name, n, k, kind, fused), m in product(SHAPES, args.rows):
        p = GemmProblem(m, n, k, "bf16", kind, fused)
        times: list[tuple[float, StreamChoice]] = []
        for choice in candidates(p, ctx):
            work = binder.bind(planned(ctx, p, choice))
            times.append((graph_ms(ctx, work) / LAYERS * 1e3, choice))
        times.sort(key=lambda t: t[0])
        floor = 2 * n * k / bandwidth * 1e6
        chosen = choose_stream(p, ctx.device.info)
        mine = next((t for t, c in times if c == chosen), float("nan"))
        print(f"{name} m={m}: floor {floor:.1f} us, chosen {mine:.1f} ({floor / mine:.0%})")
        for t, c in times[:4]:
            print(
                f"    {t:.1f} ({floor / t:.0%}) {c.groups}x{c.splits} depth {c.depth} {c.shared} B, {c.why}"
            )


def candidates(p: GemmProblem, ctx: CudaContext) -> list[StreamChoice]:
    found = {
        stream_choice(p, ctx.device.info, per_sm, splits, depth, p.norm)
        for per_sm, splits, depth in product((1, 2, 3), (1,) if p.norm else (1, 2, 4, 8), (2, 3, 4, 5, 7))
    }
    return [c for c in found if c is not None]


def planned(ctx: CudaContext, p: GemmProblem, choice: StreamChoice) -> list[Planned]:
    """A launch a layer, each with a weight of its own."""
    b = Builder("sweep")
    b.emit(
        LINEAR,
        out=b.output("out", 1, 8),
        a=b.input("a", 1, 8, dtype="f32"),
        w=b.weight("w", 8, 8, dtype="f32"),
    )
    plan = StepPlan({}, True)
    out, x, norm, weights = (Place(StepMemory(name, 0)) for name in ("out", "x", "norm", "weights"))
    for layer in range(LAYERS):
        c = LoweringContext(b.calls[0], Step(ctx.target, {}, True), plan)
        w = weights + 2 * layer * p.n * p.k
        stream(c, p, choice, out, x, w, norm=norm if p.norm else None)
    return list(plan.launches)


if __name__ == "__main__":
    main()
