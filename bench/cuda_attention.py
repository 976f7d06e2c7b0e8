"""One layer's paged attention on this GPU: microseconds, share of read bandwidth or TFLOP/s.

    python bench/cuda_attention.py [--layers 36] [--decode 1x1024 8x8192] [--prefill 1x1024 1x1024/16384]

ROWSxCONTEXT, for prefill ROWSxNEW/CONTEXT where tokens are cached. Heads as in Qwen3-4B (32 query, 8 KV, of
128), bf16, rows with blocks of their own. `--layers`: how far apart the blocks of one layer lie: all layers
of a block are contiguous. As in a step, a small launch that writes the queries goes before each layer's:
launches of attention alone would run into each other. Its own time is taken off.
"""

from __future__ import annotations

import argparse

import numpy as np
from cuda_decode import BLOCK, graph_ms, inputs, normal, read_bandwidth

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.program import Builder
from pegainfer.runtime.cuda.tensor import DeviceTensor

H, G, D = 32, 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--decode", nargs="*", default=["1x1024", "16x1024", "1x8192", "8x8192"])
    parser.add_argument("--prefill", nargs="*", default=["1x1024", "4x1024", "1x8192"])
    parser.add_argument("--once", action="store_true", help="run each shape once, for a profiler")
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = 1.0 if args.once else read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s; {args.layers} layers")
    for text in args.decode:
        rows, context = map(int, text.split("x"))
        us = measure(ctx, args.layers, rows, 1, context, args.once)
        nbytes = rows * context * 2 * G * D * 2
        print(
            f"decode {text}: {us:.1f} us, {nbytes / us / 1e6:.2f} TB/s, {nbytes / us * 1e6 / bandwidth:.0%}"
        )
    for text in args.prefill:
        rows, count, *cached = map(int, text.replace("/", "x").split("x"))
        context = cached[0] if cached else count
        us = measure(ctx, args.layers, rows, count, context, args.once)
        pairs = rows * count * (context - count / 2)
        print(f"prefill {text}: {us:.1f} us, {4 * pairs * H * D / us / 1e6:.0f} TFLOP/s")


def measure(ctx: CudaContext, layers: int, rows: int, count: int, context: int, once: bool) -> float:
    """Median microseconds of one layer, each launch on another layer's keys and values."""
    width = -(-context // BLOCK)
    b = Builder("attention")
    kv = b.state("kv", rows * width, layers, 2, G, BLOCK, D, dtype="bf16")
    q, out = (make(n, "T", H, D, dtype="bf16") for n, make in (("q", b.buffer), ("out", b.output)))
    names = ("query_starts", "query_lens", "context_lens")
    lens = [b.input(n, "R") for n in names]
    table = b.input("kv.block_table", "R", width)
    ids = b.input("rows", "T")
    words = b.weight("table", 64, H * D, dtype="bf16")
    for layer in range(min(layers, 8)):
        b.emit(EMBEDDING, out=q.view("T", H * D), table=words, ids=ids)
        b.emit(
            ATTENTION, {"layer": layer, "scale": D**-0.5}, out=out, q=q, kv=kv,
            **dict(zip(names, lens, strict=True)), block_table=table,
        )  # fmt: skip
    backend = CudaBackend(ctx, {}, CudaOptions(graphs=False), Dummy())
    cache = DeviceTensor.empty((rows * width, layers, 2, G, BLOCK, D), "bf16", "KV cache")
    normal(ctx, cache)
    env = {"T": rows * count, "R": rows}
    executor: CudaExecutor = backend.prepare(b.build(), {"kv": cache}, env)
    backend.load()
    given = inputs(rows, count, context, width)
    given["rows"] = np.arange(rows * count, dtype=np.int32) % 64
    executor.run(given, env)
    ctx.stream.synchronize("attention")
    if once:
        return 1.0
    work = executor.work(env, count == 1)
    everything = [w for _, launches in work for w in launches]
    small = [w for call, launches in work for w in launches if call.spec is EMBEDDING]
    return (graph_ms(ctx, everything) - graph_ms(ctx, small)) / min(layers, 8) * 1e3


if __name__ == "__main__":
    main()
