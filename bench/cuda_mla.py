"""One layer's latent attention (MLA) on this GPU: microseconds, share of read bandwidth or TFLOP/s.

    python bench/cuda_mla.py [--heads 16] [--layers 27] [--decode 64x4096] [--prefill 1x1024 1x1024/16384]
        [--least 64 100000] [--chunk 128]

ROWSxCONTEXT, for prefill ROWSxNEW/CONTEXT where tokens are cached. Rows of 512 + 64 numbers, query heads of
128 + 64 channels and values of 128, bf16, rows with blocks of their own. `--layers`: how far apart the blocks
of one layer lie: all layers of a block are contiguous. As in a step, a small launch that writes the queries
goes before each layer's. Its own time is taken off, so a figure has all that mla_attention launches; `core`:
the attention kernels alone. `--least`: query tokens from which on prefilled rows are attended over
expanded latents. `--chunk`: keys of a decoded part of short rows, instead of the chooser's. With several
values of either, each is measured.

A decoded key is read once, 1,152 bytes for all heads. Prefill counts the FLOPs of attention over expanded
heads, 2 · (192 + 128) a pair of tokens and head, whatever the kernels do; expanding is not counted.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from cuda_decode import BLOCK, graph_ms, inputs, normal, read_bandwidth

from pegainfer.lower.cuda import latent, mla_expanded
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.mla import MLA_ATTENTION
from pegainfer.ops.program import Builder
from pegainfer.runtime.cuda.launch import Launch
from pegainfer.runtime.cuda.tensor import DeviceTensor

WIDTH, RANK, KEPT, ROTATED, VALUES = 576, 512, 128, 64, 128
MEASURED = 8  # layers, at most
CORE = ("latent_attention_", "mla_attend_expanded_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--decode", nargs="*", default=["1x1024", "8x1024", "64x4096", "128x1024"])
    parser.add_argument("--prefill", nargs="*", default=["1x1024", "1x4096", "1x16000", "1x512/8192"])
    parser.add_argument("--least", type=int, nargs="*", default=[mla_expanded.LEAST_TOKENS])
    parser.add_argument("--chunk", type=int, nargs="*", default=[])
    args = parser.parse_args()
    chosen = latent.CHUNK, latent.ALONE_CHUNK
    ctx = CudaContext()
    bandwidth = read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s; {args.heads} heads")
    for text in args.decode:
        rows, context = map(int, text.split("x"))
        nbytes = rows * context * WIDTH * 2
        for chunk in args.chunk or [chosen[rows == 1]]:
            latent.CHUNK = latent.ALONE_CHUNK = chunk
            us, core = measure(ctx, args, rows, 1, context)
            share = [nbytes / t * 1e6 / bandwidth for t in (us, core)]
            print(
                f"decode {text}, parts of {chunk}: {us:.1f} us, {nbytes / us / 1e6:.2f} TB/s, "
                f"{share[0]:.0%}; core {core:.1f} us, {share[1]:.0%}"
            )
    for text in args.prefill:
        rows, count, *cached = map(int, text.replace("/", "x").split("x"))
        context = cached[0] if cached else count
        flops = 2 * (KEPT + ROTATED + VALUES) * args.heads * rows * count * (context - count / 2)
        for least in args.least:
            mla_expanded.LEAST_TOKENS = least
            us, core = measure(ctx, args, rows, count, context)
            print(
                f"prefill {text}, {'expanded' if count >= least else 'absorbed'}: {us:.1f} us, "
                f"{flops / us / 1e6:.0f} TFLOP/s; core {core:.1f} us, {flops / core / 1e6:.0f} TFLOP/s"
            )


def measure(ctx: CudaContext, args: Any, rows: int, count: int, context: int) -> tuple[float, float]:
    """Median microseconds of one layer, of all launches and of the attention kernel alone; each layer's
    launches read another layer's rows."""
    width, heads = -(-context // BLOCK), args.heads
    b = Builder("latent attention")
    kv = b.state("kv", rows * width, args.layers, BLOCK, WIDTH, dtype="bf16")
    q = b.buffer("q", "T", heads, KEPT + ROTATED, dtype="bf16")
    out = b.output("out", "T", heads, VALUES, dtype="bf16")
    names = ("query_starts", "query_lens", "context_lens")
    lens = [b.input(n, "R") for n in names]
    table = b.input("kv.block_table", "R", width)
    ids = b.input("rows", "T")
    words = b.weight("table", 64, heads * (KEPT + ROTATED), dtype="bf16")
    layers = min(args.layers, MEASURED)
    for layer in range(layers):
        b.emit(EMBEDDING, out=q.view("T", heads * (KEPT + ROTATED)), table=words, ids=ids)
        w_k = b.weight(f"{layer}.w_k", heads, RANK, KEPT, dtype="bf16")
        w_v = b.weight(f"{layer}.w_v", heads, VALUES, RANK, dtype="bf16")
        b.emit(
            MLA_ATTENTION, {"layer": layer, "scale": 0.1147}, out=out, q=q, kv=kv, w_k=w_k, w_v=w_v,
            **dict(zip(names, lens, strict=True)), block_table=table,
        )  # fmt: skip
    backend = CudaBackend(ctx, {}, CudaOptions(graphs=False), Dummy())
    cache = DeviceTensor.empty((rows * width, args.layers, BLOCK, WIDTH), "bf16", "KV cache")
    normal(ctx, cache)
    env = {"T": rows * count, "R": rows}
    executor: CudaExecutor = backend.prepare(b.build(), {"kv": cache}, env)
    backend.load()
    given = inputs(rows, count, context, width)
    given["rows"] = np.arange(rows * count, dtype=np.int32) % 64
    executor.run(given, env)
    ctx.stream.synchronize("latent attention")
    work = executor.work(env, count == 1)
    everything = [w for _, launches in work for w in launches]
    small = [w for call, launches in work for w in launches if call.spec is EMBEDDING]
    core = [w for w in everything if isinstance(w, Launch) and w.kernel.name.startswith(CORE)]
    us = [graph_ms(ctx, w) / layers * 1e3 for w in (everything, small, core)]
    return us[0] - us[1], us[2]


if __name__ == "__main__":
    main()
