"""Linear attention on a GPU: device time, rate and bandwidth of rows of one token and of whole prompts.

python bench/cuda_delta.py [--key-heads 16] [--heads 32] [--decode 1 8 64 256] [--prefill 1x1024 8x1024]
    [--state-dtype bf16]

Decode is the launch behind the projections: convolution, delta rule and gated norm. It reads and writes each
row's state (from memory: rows have states of their own in every call). Prefill is the delta rule
alone; it counts 180,224 FLOP a token and value head, the GEMMs of a chunk of 64 tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.measure.cuda.roofline import measure_roofline
from pegainfer.measure.cuda.timing import graph_times
from pegainfer.ops.compose import one_call
from pegainfer.ops.delta import GATED_DELTA_RULE, STATES
from pegainfer.ops.gated_delta import GATED_DELTA
from pegainfer.ops.spec import Role
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.launch import Launch
from pegainfer.runtime.cuda.stream import Event
from pegainfer.runtime.cuda.tensor import DeviceTensor, item_bytes

DIM = 128
FLOPS = 180_224  # a token and value head
SIXTEEN = ("qkv", "a", "b", "out", "x", "conv", "w_qkv", "w_z", "w_a", "w_b")  # operands of bf16
HIDDEN, TAPS = 2560, 4
STATE_BYTES = 2 << 30  # of all states together, so that none is in the L2 cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32, help="value heads")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64, 256], help="rows")
    parser.add_argument(
        "--prefill", nargs="*", default=["1x1024", "1x16000", "8x1024"], help="ROWSxTOKENS of each row"
    )
    parser.add_argument("--state-dtype", choices=STATES, default=STATES[0])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = measure_roofline(ctx).read_gb_s * 1e9
    copying = copy_bandwidth(ctx)
    print(
        f"{ctx.device.info.name}, reads {bandwidth / 1e12:.2f} TB/s, copies (reads and writes) "
        f"{copying / 1e12:.2f} TB/s; {args.key_heads}/{args.heads} heads"
    )
    for rows in args.decode:
        each = args.heads * DIM * DIM * item_bytes(args.state_dtype)
        layers = max(2, STATE_BYTES // (each * rows))
        us = timed(ctx, args, [1] * rows, layers)
        moved = 2 * each * rows
        share, of_copying = (moved / (us * 1e-6) / rate for rate in (bandwidth, copying))
        print(
            f"decode {rows:4} rows    {us:9.2f} us  {moved / us / 1e6:6.2f} TB/s, {share:.0%} of reading, "
            f"{of_copying:.0%} of copying"
        )
    for shape in args.prefill:
        rows, tokens = map(int, shape.split("x"))
        us = timed(ctx, args, [tokens] * rows, 1)
        rate = FLOPS * args.heads * rows * tokens / us / 1e6
        print(f"prefill {rows:3} x {tokens:6} {us:9.2f} us  {rate:6.1f} TFLOP/s")


def copy_bandwidth(ctx: CudaContext) -> float:
    """Bytes read and written a second by the driver's copy of a large array on the device."""
    source, target = (DeviceTensor.empty((1 << 28,), "f32") for _ in range(2))
    seconds = []
    for _ in range(6):
        start, stop = Event(timing=True), Event(timing=True)
        start.record(ctx.stream)
        ctx.stream.copy(target.address, source.address, source.nbytes)
        stop.record(ctx.stream)
        ctx.stream.synchronize("copy")
        seconds.append(stop.milliseconds_since(start) / 1e3)
    return 2 * source.nbytes / statistics.median(seconds)


def timed(ctx: CudaContext, args: argparse.Namespace, counts: Sequence[int], layers: int) -> float:
    """Median microseconds of a call. Calls go through the layers of the states in turn."""
    rng = np.random.default_rng(0)
    tokens, rows = sum(counts), len(counts)
    width = 2 * args.key_heads * DIM + args.heads * DIM
    sizes = {"T": tokens, "R": rows, "H": args.heads, "K": DIM, "V": DIM, "F": width, "N": rows, "Y": layers}
    sizes |= {"M": HIDDEN, "A": args.heads * DIM, "W": TAPS, "X": TAPS - 1}
    spec = GATED_DELTA if max(counts) == 1 else GATED_DELTA_RULE
    dtypes = {o.name: "bf16" if o.name in SIXTEEN else o.dtypes[0] for o in spec.operands}
    dtypes["delta"] = args.state_dtype
    attrs = {"eps": 1e-6, "key_eps": 1e-6, "tiled": False}
    works: list[Any] = []
    kept: list[Any] = []  # memory that the launches use
    states: dict[str, DeviceTensor] = {}
    for layer in range(min(layers, 8)):
        given = {name: layer if name == "layer" else attrs[name] for name in spec.attrs}
        program = one_call(spec, sizes, dtypes, given)
        for t in program.tensors(Kind.STATE) if not states else ():
            states[t.name] = DeviceTensor.empty(t.sizes({}), t.dtype)
            ctx.stream.fill(states[t.name].address, 0, states[t.name].nbytes)
        backend = CudaBackend(ctx, {}, CudaOptions(graphs=False), Dummy())
        executor = backend.prepare(program, states, sizes)
        backend.load()
        executor.run(inputs(rng, spec, sizes, counts), sizes)
        launches = [w for _, call in executor.work(sizes, max(counts) == 1) for w in call]
        works += [w for w in launches if isinstance(w, Launch) and w.kernel.name.startswith("delta_")]
        kept.append((backend, executor))
    ctx.stream.synchronize("delta bench")
    times = graph_times(ctx, works, args.repeats, "delta bench")
    return statistics.median(times) / min(layers, 8)


def inputs(
    rng: np.random.Generator, spec: Any, sizes: dict[str, int], counts: Sequence[int]
) -> dict[str, np.ndarray[Any, Any]]:
    """Normal values; rows go on from their states after 100 tokens."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for o in spec.operands:
        if o.role is Role.IN:
            shape = [sizes[a] for a in o.axes]
            found[o.name] = (
                np.zeros(shape, np.int32)
                if o.dtypes == ("i32",)
                else rng.normal(size=shape).astype(np.float32)
            )
    found["state_ids"] = np.arange(len(counts), dtype=np.int32)
    found["state_saves"][...] = -1
    found["query_lens"] = np.array(counts, np.int32)
    found["query_starts"] = np.array([0, *np.cumsum(counts)[:-1]], np.int32)
    found["context_lens"] = found["query_lens"] + 100
    return found


if __name__ == "__main__":
    main()
