"""The linear layers of Qwen3-4B from packed weights on one GPU, beside those of bf16.

    python bench/cuda_quantized.py [--formats bf16 q4_1 int4_g128 q4_k q8_0] [--rows 1 8 16 32] [--sweep]

Of every format the weights of all layers and of the head are made up; the launches of a decode step that
multiply by a weight run as one graph. Prints microseconds, and the bytes of the weights over that time as a
share of the read bandwidth that the same run measures. --sweep prints instead how long each shape's launches
take with other shares of an SM and other rings than the chooser's: rows for lower/cuda/cards.json.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cuda_decode import BLOCK, graph_ms, normal, qwen3_4b, read_bandwidth

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Matmul, Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.packed import TOKENS
from pegainfer.lower.cuda.store import Dummy
from pegainfer.lower.cuda.target import Tuned, Tuning
from pegainfer.models.qwen3.forward import forward, groups
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.launch import Launch
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.weights.weight import float32

CONTEXT = 64  # tokens; attention is not timed
SHAPES = ((6144, 2560), (2560, 4096), (19_456, 2560), (2560, 9728), (151_936, 2560))
PRODUCTS = ("skinny", "wide", "stream", "packed", "expand")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["bf16", "q4_1", "int4_g128", "q4_k", "q8_0"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("bench/results/cuda-quantized.jsonl"))
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s")
    if args.sweep:
        for format_name in args.formats:
            sweep(ctx, format_name, args.rows, args.layers, bandwidth)
        return
    plain: dict[int, float] = {}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("a") as out:
        for format_name in args.formats:
            for rows, ms, nbytes in measured(ctx, format_name, args.rows, args.layers):
                if format_name == "bf16":
                    plain[rows] = ms
                row = {
                    "device": ctx.device.info.name, "format": format_name, "rows": rows,
                    "us": round(1e3 * ms, 1), "bytes": nbytes,
                    "share": round(nbytes / bandwidth * 1e3 / ms, 3),
                    "times_bf16": round(plain[rows] / ms, 2) if rows in plain else None,
                }  # fmt: skip
                print(row, flush=True)
                out.write(json.dumps(row) + "\n")


def measured(
    ctx: CudaContext, format_name: str, counts: list[int], layers: int
) -> list[tuple[int, float, int]]:
    """(rows, milliseconds of the launches that multiply by a weight, bytes of the weights)."""
    backend, prepare = prepared(ctx, format_name, max(counts), layers)
    executor = prepare()
    backend.load()
    found = []
    for rows in counts:
        env = {"T": rows, "R": rows, "L": rows}
        work = [w for _, made in executor.work(env, decode_only=True) for w in made if is_product(w)]
        found.append((rows, graph_ms(ctx, work), matrix_bytes(backend)))
    del executor, backend, prepare
    gc.collect()
    return found


def matrix_bytes(backend: CudaBackend) -> int:
    """Bytes of the weights that are multiplied by; norms and tables are vectors of float32."""
    return sum(t.nbytes for t in backend.store._held.values() if t.dtype != "f32")


def sweep(ctx: CudaContext, format_name: str, counts: list[int], layers: int, bandwidth: float) -> None:
    """Prints, for each shape and number of rows, the launches from the quickest on."""
    target = ctx.target
    backend, prepare = prepared(ctx, format_name, max(counts), layers)
    times: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
    for tokens, per_sm, depth in itertools.product(TOKENS, (1, 2), (4, 6, 8)):
        enough = {m: next((t for t in TOKENS if m <= t), TOKENS[-1]) for m in counts}
        taken = [m for m, most in enough.items() if tokens <= most <= 2 * tokens]
        if not taken:
            continue
        numbers = {"tokens": tokens, "per_sm": per_sm, "depth": depth}
        rows = tuple(
            Tuned(target.info.name, target.info.arch, "packed", {"n": n, "k": k, "bits": bits}, 256, numbers)
            for (n, k), bits in itertools.product(SHAPES, (4, 8))
        )
        ctx.target = replace(target, tuning=Tuning((*target.tuning.rows, *rows)))
        executor = prepare()
        backend.load()
        for m in taken:
            env = {"T": m, "R": m, "L": m}
            by_shape: dict[str, list[Work]] = defaultdict(list)
            for call, made in executor.work(env, decode_only=True):
                products = [w for w in made if is_product(w)]
                if products:
                    by_shape[f"{call.spec.name} {call.axes.get('K', '')}"] += products
            for shape, work in by_shape.items():
                one = work[0]
                how = (
                    f"{one.kernel.name} grid {one.grid[0]} depth {depth}" if isinstance(one, Launch) else "?"
                )
                times[shape, m].append((1e3 * graph_ms(ctx, work) / len(work), how))
        del executor
    for (shape, m), found in sorted(times.items()):
        best = ", ".join(f"{us:.2f} {how}" for us, how in sorted(found)[:5])
        print(f"{format_name} {shape} m={m}: {best}", flush=True)
    ctx.target = target


def prepared(
    ctx: CudaContext, format_name: str, most: int, layers: int
) -> tuple[CudaBackend, Callable[[], CudaExecutor]]:
    """The backend of a model with made up weights, and what makes an executor of its steps."""
    config = qwen3_4b(layers)
    width = -(-CONTEXT // BLOCK)
    steps = Formats("bf16", "bf16", "bf16")
    sizes = Sizes(groups(config, BLOCK, steps), (most * width,), width * BLOCK)
    shapes = TABLE.shapes(config)
    formats = {name: format_name if len(shape) > 1 else "f32" for name, shape in shapes.items()}
    program = forward(config, formats, sizes, steps)
    table = cos_sin_table(width * BLOCK, inverse_frequencies(config.head_dim, config.rope_theta, None))
    backend = CudaBackend(ctx, {"cos_sin": float32(table)}, CudaOptions(row_pass=False), Dummy())
    shape = (most * width, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
    kv = DeviceTensor.empty(shape, "bf16", "KV cache")
    normal(ctx, kv)
    return backend, lambda: backend.prepare(program, {"kv": kv}, {"T": most, "R": most, "L": most})


def is_product(work: Work) -> bool:
    """Whether it multiplies by a weight."""
    if isinstance(work, Launch):
        return work.kernel.name.startswith(PRODUCTS)
    return isinstance(work, Matmul)


if __name__ == "__main__":
    main()
