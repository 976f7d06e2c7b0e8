"""GEMMs with FP8 weights at Qwen3-4B's shapes on this GPU: TFLOP/s of many rows, bandwidth of few.

    python bench/cuda_fp8.py [--rows 1 8 32 128] [--many 4096] [--form fp8_r128]

A graph launches as many GEMMs as a pass over the model has of that shape, each with a weight of its own, so
that caches are cold. Times include the quantisation of activations. Beside each stands the same in bf16.
"""

from __future__ import annotations

import argparse
from itertools import product

from cuda_decode import graph_ms, read_bandwidth

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.fp8_store import nbytes_of
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.ops.coarse import GATE_UP_SWIGLU
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.program import Builder, Program

LAYERS = 36
SHAPES = (  # name, n, k; gate_up's n is that of each
    ("qkv", 6144, 2560),
    ("o", 2560, 4096),
    ("gate_up", 9728, 2560),
    ("down", 2560, 9728),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--many", type=int, nargs="*", default=[4096])
    parser.add_argument("--form", default="fp8_r128", choices=["fp8_r128", "fp8_g128"])
    parser.add_argument("--layers", type=int, default=LAYERS)
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s; {args.form}")
    most = max([*args.rows, *args.many])
    for name, n, k in SHAPES:
        executors = {form: make(ctx, name, n, k, form, args.layers, most) for form in (args.form, "bf16")}
        count = 2 if name == "gate_up" else 1
        for m, (form, executor) in product([*args.rows, *args.many], executors.items()):
            env = {"T": m}
            executor.capture(env, decode_only=False)
            step = executor.work(env)
            us = graph_ms(ctx, [w for _, work in step for w in work]) / args.layers * 1e3
            nbytes = count * (nbytes_of((n, k), form) if form != "bf16" else 2 * n * k)
            speed = f"{2 * m * n * count * k / us / 1e6:.0f} TFLOP/s"
            share = f"{nbytes / us / 1e-6 / bandwidth:.0%} of the read bandwidth"
            print(f"{name} m={m} {form}: {us:.2f} us, {share if m < 512 else speed}", flush=True)


def make(ctx: CudaContext, name: str, n: int, k: int, form: str, layers: int, rows: int) -> CudaExecutor:
    """Executor of that many GEMMs in a row."""
    backend = CudaBackend(ctx, {}, CudaOptions(tune=form == "bf16"), Dummy())
    executor = backend.prepare(program(name, n, k, form, layers), {}, {"T": rows})
    backend.load()
    return executor


def program(name: str, n: int, k: int, form: str, layers: int, out_dtype: str = "bf16") -> Program:
    b = Builder(name)
    x = b.input("x", "T", k, dtype="bf16")
    out = b.output("out", "T", n, dtype=out_dtype)
    for i in range(layers):
        if name == "gate_up":
            b.emit(
                GATE_UP_SWIGLU, {"eps": 1e-6}, out=out, x=x, norm=b.weight(f"norm{i}", k, dtype="f32"),
                w_gate=b.weight(f"gate{i}", n, k, dtype=form), w_up=b.weight(f"up{i}", n, k, dtype=form),
            )  # fmt: skip
        else:
            b.emit(LINEAR, out=out, a=x, w=b.weight(f"w{i}", n, k, dtype=form))
    return b.build()


if __name__ == "__main__":
    main()
