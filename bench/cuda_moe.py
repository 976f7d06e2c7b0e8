"""A mixture of experts on a GPU: share of the read bandwidth at small batches, rate of the grouped GEMM.

python bench/cuda_moe.py [--model 30B-A3B] [--batch 1 8 32 128] [--tokens 1024 16384] [--kernels]

Batches: norm, router, experts and their sum, added to the residual stream: all launches of the block. The
bytes counted are those of the router and of the experts that the tokens really chose. Each layer has weights
of its own, so that none are in the L2 cache. Tokens: the two launches of expert GEMMs alone, beside dense
GEMMs of the same FLOP by cuBLASLt in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.measure.cuda.roofline import measure_roofline
from pegainfer.measure.cuda.shares import kernel_shares
from pegainfer.measure.cuda.timing import graph_times
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.moe import MOE
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.runtime.cuda.launch import Launch

# Experts, experts of a token, widths of the residual stream and of an expert.
MODELS = {"30B-A3B": (128, 8, 2048, 768), "35B-A3B": (256, 8, 2048, 512), "V2-Lite": (64, 6, 2048, 1408)}
ROUTING = {"sigmoid": False, "renormalize": True, "scale": 1.0, "groups": 1, "kept_groups": 1}
VOCAB = 4096  # rows of x that tokens are drawn from
LAYERS = 6  # of 1.1 to 1.6 GB, in turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="30B-A3B")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 16384])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kernels", action="store_true", help="the device time of batches by kernel")
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = measure_roofline(ctx).read_gb_s * 1e9
    print(f"{ctx.device.info.name}, reads {bandwidth / 1e12:.2f} TB/s; {args.model}, bf16")
    for batch in args.batch:
        us, nbytes, chosen = decode(ctx, args, batch)
        share = nbytes / (us * 1e-6) / bandwidth
        print(
            f"batch {batch:4}  {us:9.2f} us a block  {nbytes / 1e6:8.1f} MB of {chosen:5.1f} experts  "
            f"{share:.0%} of reading"
        )
    for tokens in args.tokens:
        grouped, flops = prefill(ctx, args, tokens)
        same = dense(ctx, args, tokens)
        rates = [flops / us / 1e6 for us in (grouped, same)]
        print(
            f"tokens {tokens:6}  grouped {grouped:9.1f} us  {rates[0]:6.1f} TFLOP/s   "
            f"dense {same:9.1f} us  {rates[1]:6.1f} TFLOP/s   {same / grouped:.0%}"
        )


def block(model: str, layers: int) -> Program:
    """x = table[ids], then blocks of experts, each added to x."""
    n, k, m, f = MODELS[model]
    b = Builder("moe_bench")
    x = b.output("x", "T", m, dtype="bf16")
    partial = b.buffer("partial", "T", m)
    b.emit(EMBEDDING, out=x, table=b.weight("table", VOCAB, m, dtype="bf16"), ids=b.input("ids", "T"))
    for i in range(layers):
        shapes = {"w_router": (n, m), "w_gate": (n, f, m), "w_up": (n, f, m), "w_down": (n, m, f)}
        w = {name: b.weight(f"{i}.{name}", *shape, dtype="bf16") for name, shape in shapes.items()}
        b.emit(
            MOE, {"eps": 1e-6, **ROUTING},
            out=partial, experts=b.output(f"experts.{i}", "T", k, dtype="i32"), x=x,
            norm=b.weight(f"{i}.norm", m, dtype="f32"), **w,
        )  # fmt: skip
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    return b.build()


def prepared(
    ctx: CudaContext, program: Program, tokens: int
) -> tuple[CudaExecutor, list[Work], dict[str, np.ndarray[Any, Any]]]:
    """A program that has run once: its launches and its outputs. The executor holds their memory."""
    backend = CudaBackend(ctx, {}, CudaOptions(graphs=False), Dummy())
    sizes = {"T": tokens}
    executor: CudaExecutor = backend.prepare(program, {}, sizes)
    backend.load()
    executor.capture(sizes, False, graph=False)
    ids = np.random.default_rng(0).integers(0, VOCAB, tokens).astype(np.int32)
    outputs = executor.run({"ids": ids}, sizes)
    made = {name: t.numpy(ctx.stream) for name, t in outputs.items() if t.dtype == "i32"}
    return executor, executor.launches(sizes, False), made


def decode(ctx: CudaContext, args: argparse.Namespace, batch: int) -> tuple[float, float, float]:
    """Microseconds, bytes read and experts chosen, of a block in the mean over the layers."""
    n, _, m, f = MODELS[args.model]
    executor, works, outputs = prepared(ctx, block(args.model, args.layers), batch)
    # With the embedding, so that every replay begins with the same x and chooses the same experts.
    us = statistics.median(graph_times(ctx, works, args.repeats, "moe bench")) / args.layers
    if args.kernels:
        for share in kernel_shares(ctx, works):
            print(f"  {share}")
    count = float(np.mean([len(np.unique(chosen)) for chosen in outputs.values()]))
    del executor
    return us, 2 * (n * m + count * 3 * m * f), count


def prefill(ctx: CudaContext, args: argparse.Namespace, tokens: int) -> tuple[float, float]:
    """Microseconds of the expert GEMMs of a block, and their FLOP."""
    _, k, m, f = MODELS[args.model]
    executor, works, _ = prepared(ctx, block(args.model, 2), tokens)
    gemms = [w for w in works if isinstance(w, Launch) and w.kernel.name.startswith("expert_")]
    us = statistics.median(graph_times(ctx, gemms, args.repeats, "moe bench")) / 2
    del executor
    return us, 6.0 * tokens * k * m * f


def dense(ctx: CudaContext, args: argparse.Namespace, tokens: int) -> float:
    """Microseconds of two GEMMs by cuBLASLt of as many rows as there are slots, of one expert's widths."""
    _, k, m, f = MODELS[args.model]
    total = 0.0
    for rows, columns in ((2 * f, m), (m, f)):
        b = Builder("dense_bench")
        table = b.weight("table", VOCAB, columns, dtype="bf16")
        x = b.buffer("x", "T", columns, dtype="bf16")
        b.emit(EMBEDDING, out=x, table=table, ids=b.input("ids", "T"))
        w = b.weight("w", rows, columns, dtype="bf16")
        b.emit(LINEAR, out=b.output("out", "T", rows, dtype="bf16"), a=x, w=w)
        executor, works, _ = prepared(ctx, b.build(), tokens * k)
        total += statistics.median(graph_times(ctx, works[1:], args.repeats, "dense bench"))
        del executor
    return total


if __name__ == "__main__":
    main()
