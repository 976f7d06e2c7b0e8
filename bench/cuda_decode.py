"""Decode steps of a Qwen3-4B-shaped model on one GPU: milliseconds, share of the memory's floor, by op.

    python bench/cuda_decode.py [--batch 1 4 8 16] [--context 1024] [--layers 36]

Weights are seeded normals; the forward is that of the qwen3 line, in bf16. The floor is
what must be read, weights and cache, over the read bandwidth that the same run measures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Matmul, Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.forward import forward, groups
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.graph import Graph
from pegainfer.runtime.cuda.launch import Launch, f32, i64, ptr
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.stream import Event
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.weights.weight import float32

BLOCK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024])
    args = parser.parse_args()

    ctx = CudaContext()
    bandwidth = read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s")
    config = qwen3_4b(args.layers)
    rows, tokens = max(args.batch), max([*args.batch, *args.prefill])
    started = time.perf_counter()
    executor, backend = make(ctx, config, rows, tokens, max(args.context, *args.prefill, BLOCK))
    print(f"{backend.store.nbytes / 1e9:.2f} GB of weights made in {time.perf_counter() - started:.1f} s")
    for batch in args.batch:
        decode(ctx, executor, config, backend.store.nbytes, bandwidth, batch, args.context)
    for length in args.prefill:
        prefill(ctx, executor, config, length)


def qwen3_4b(layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_layers=layers, num_heads=32,
        num_kv_heads=8, head_dim=128, norm_eps=1e-6, rope_theta=1e6, rope_scaling=None,
        max_position_embeddings=40_960, tie_word_embeddings=True,
    )  # fmt: skip


def make(
    ctx: CudaContext, c: Qwen3Config, rows: int, tokens: int, context: int
) -> tuple[CudaExecutor, CudaBackend]:
    width = -(-context // BLOCK)
    blocks = rows * width
    table = cos_sin_table(width * BLOCK, inverse_frequencies(c.head_dim, c.rope_theta, None))
    formats = dict.fromkeys(TABLE.shapes(c), "bf16")
    steps = Formats("bf16", "bf16", "bf16")
    sizes = Sizes(groups(c, BLOCK, steps), (blocks,), width * BLOCK)
    program = forward(c, formats, sizes, steps)
    backend = CudaBackend(
        ctx,
        {"cos_sin": float32(table)},
        CudaOptions(),
        Dummy(),
    )
    kv = DeviceTensor.empty((blocks, c.num_layers, 2, c.num_kv_heads, BLOCK, c.head_dim), "bf16", "KV cache")
    normal(ctx, kv)
    executor = backend.prepare(program, {"kv": kv}, {"T": tokens, "R": rows, "L": rows})
    backend.load()
    return executor, backend


def normal(ctx: CudaContext, t: DeviceTensor) -> None:
    kernel = ctx.library.kernel("fill_normal_bf16")
    args = [ptr(t.address), i64(t.nbytes // 2), i64(1), f32(0), f32(1)]
    Launch(kernel, (1024, 1, 1), 256, args)(ctx.stream)


def read_bandwidth(ctx: CudaContext, nbytes: int = 1 << 31) -> float:
    """Bytes a second of a kernel that only reads."""
    buffer = DeviceBuffer(nbytes, "read probe")
    normal(ctx, DeviceTensor.at(buffer.address, (nbytes // 2,), "bf16"))
    kernel = ctx.library.kernel("read_bandwidth")
    best = 0.0
    for per_sm in (2, 4, 8):
        grid = (per_sm * ctx.device.info.num_sms, 1, 1)
        launch = Launch(kernel, grid, 512, [ptr(buffer.address), ptr(buffer.address), i64(nbytes // 16)])
        best = max(best, nbytes / milliseconds(ctx, lambda launch=launch: launch(ctx.stream)) * 1e3)
    buffer.free()
    return best


def milliseconds(ctx: CudaContext, work: Callable[[], None], repeats: int = 15) -> float:
    """Median device time; the first run is not counted."""
    times = []
    for _ in range(repeats + 1):
        start, stop = Event(timing=True), Event(timing=True)
        start.record(ctx.stream)
        work()
        stop.record(ctx.stream)
        stop.wait()
        times.append(stop.milliseconds_since(start))
    return statistics.median(times[1:])


def graph_ms(ctx: CudaContext, work: list[Work]) -> float:
    def body() -> None:
        for w in work:
            w(ctx.stream)

    graph = Graph(ctx.stream, body, "bench")
    result = milliseconds(ctx, lambda: graph.launch(ctx.stream))
    graph.close()
    return result


def inputs(rows: int, count: int, context: int, width: int) -> dict[str, np.ndarray]:
    """Rows that compute the last `count` of `context` tokens each, every row with blocks of its own."""
    table = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    positions = np.tile(np.arange(context - count, context), rows).astype(np.int32)
    row = np.repeat(np.arange(rows), count)
    return {
        "token_ids": np.arange(rows * count, dtype=np.int32) * 7 % 1000,
        "positions": positions,
        "kv.places": (table[row, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
        "query_starts": np.arange(rows, dtype=np.int32) * count,
        "query_lens": np.full(rows, count, np.int32),
        "context_lens": np.full(rows, context, np.int32),
        "kv.block_table": table,
        "logit_rows": (np.arange(rows, dtype=np.int32) + 1) * count - 1,
    }


def decode(
    ctx: CudaContext,
    executor: CudaExecutor,
    c: Qwen3Config,
    weights: int,
    bandwidth: float,
    batch: int,
    context: int,
) -> None:
    env = {"T": batch, "R": batch, "L": batch}
    width = executor.program.calls[2].axes["W"]
    given = inputs(batch, 1, context, int(width))
    executor.capture(env, decode_only=True)
    executor.run(given, env)
    ctx.stream.synchronize()
    step = executor.work(env, decode_only=True)
    by_op: dict[str, list[Work]] = defaultdict(list)
    for call, work in step:
        name = call.spec.name
        by_op[f"{name}_{call.axes['K']}" if name == "linear_residual" else name] += work
    everything = [w for _, work in step for w in work]
    total = graph_ms(ctx, everything)
    products = graph_ms(ctx, [w for w in everything if is_product(w)])
    kv = batch * context * c.num_layers * 2 * c.kv_size * 2
    floor = (weights + kv) / bandwidth * 1e3
    host = []
    for _ in range(20):
        started = time.perf_counter()
        executor.run(given, env)
        host.append((time.perf_counter() - started) * 1e6)
        ctx.stream.synchronize()
    parts = ", ".join(f"{n} {graph_ms(ctx, w):.3f}" for n, w in by_op.items())
    print(
        f"decode {batch} x {context}: {total:.3f} ms, floor {floor:.3f}, share {floor / total:.1%}, "
        f"{len(everything)} launches, host {statistics.median(host):.0f} us a step | "
        f"all products {products:.3f}, {weights / bandwidth * 1e3 / products:.1%} of the read bandwidth | "
        f"alone: {parts}"
    )


def is_product(work: Work) -> bool:
    """Whether it multiplies by a weight."""
    if isinstance(work, Launch):
        return work.kernel.name.startswith(("skinny", "wide", "stream"))
    return isinstance(work, Matmul)


def prefill(ctx: CudaContext, executor: CudaExecutor, c: Qwen3Config, length: int) -> None:
    env = {"T": length, "R": 1, "L": 1}
    width = int(executor.program.calls[2].axes["W"])
    executor.capture(env, decode_only=False)
    executor.run(inputs(1, length, length, width), env)
    ctx.stream.synchronize()
    step = executor.work(env)
    by_op: dict[str, list[Work]] = defaultdict(list)
    for call, work in step:
        by_op[call.spec.name] += work
    total = milliseconds(ctx, lambda: executor.run(inputs(1, length, length, width), env))
    parts = ", ".join(f"{n} {graph_ms(ctx, w):.2f}" for n, w in by_op.items())
    print(f"prefill {length}: {total:.2f} ms | alone, heuristics' first algorithms: {parts}")


if __name__ == "__main__":
    main()
