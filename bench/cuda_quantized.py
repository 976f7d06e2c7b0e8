"""The linear layers of Qwen3-4B from packed weights on one GPU, beside those of bf16.

    python bench/cuda_quantized.py [--formats bf16 q4_1 int4_g128 q4_k q8_0] [--rows 1 8 16 32 64 128]

Of every format the weights of all layers and of the head are made up; the launches of a decode step that
multiply by a weight run as one graph. Prints microseconds, and the bytes of the weights over that time as a
share of the read bandwidth that the same run measures.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

from cuda_decode import BLOCK, graph_ms, normal, qwen3_4b, read_bandwidth

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Matmul, Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.models.qwen3.forward import forward, groups
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.launch import Launch
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.weights.weight import float32

CONTEXT = 64  # tokens; attention is not timed
PRODUCTS = ("skinny", "wide", "stream", "packed", "expand")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["bf16", "q4_1", "int4_g128", "q4_k", "q8_0"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--output", type=Path, default=Path("bench/results/cuda-quantized.jsonl"))
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s")
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
    config = qwen3_4b(layers)
    most = max(counts)
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
    executor = backend.prepare(program, {"kv": kv}, {"T": most, "R": most, "L": most})
    backend.load()
    found = []
    for rows in counts:
        env = {"T": rows, "R": rows, "L": rows}
        work = [w for _, made in executor.work(env, decode_only=True) for w in made if is_product(w)]
        found.append((rows, graph_ms(ctx, work), backend.store.nbytes - table.nbytes))
    del executor, backend, kv
    gc.collect()
    return found


def is_product(work: Work) -> bool:
    """Whether it multiplies by a weight."""
    if isinstance(work, Launch):
        return work.kernel.name.startswith(PRODUCTS)
    return isinstance(work, Matmul)


if __name__ == "__main__":
    main()
