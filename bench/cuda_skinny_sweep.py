"""Which shares of a bf16 weight are quickest for up to 256 rows on this GPU (Hopper).

    python bench/cuda_skinny_sweep.py --shapes 3648x2048 2048x2048+ 5632x2048 2048x2816+ [--rows 1 32 128]

NxK of a weight; `+`: the result is added to the residual stream. A graph launches that many GEMMs, each of a
weight of its own, so that caches are cold. Prints the quickest launches beside the chooser's own, in the form
in which cards.json has them (op skinny, above 64 rows op wide; None: cuBLASLt).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cuda_decode import graph_ms, read_bandwidth

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.skinny import FILLED, MAX_BLOCKS, skinny_choice
from pegainfer.lower.cuda.store import Dummy
from pegainfer.lower.cuda.target import Tuned, Tuning
from pegainfer.lower.cuda.wide import wide_choice
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.program import Builder, Program

SHOWN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s")
    whole = ctx.target
    for text in args.shapes:
        n, k = map(int, text.rstrip("+").split("x"))
        residual = text.endswith("+")
        recorded = program(n, k, residual, args.layers)
        backend = CudaBackend(ctx, {}, CudaOptions(), Dummy())
        backend.prepare(recorded, {}, {"T": max(args.rows)}).work({"T": 1})
        backend.load()
        for m in args.rows:
            times: list[tuple[float, dict[str, Any] | None]] = []
            op, most = ("skinny", 64) if m <= 64 else ("wide", 256)
            found = skinny(ctx, m, n, k, residual) if m <= 64 else wide(ctx, m, n, k, residual)
            for numbers in [{}, *found]:
                tuned = (Tuned("", whole.info.arch, op, {"n": n, "k": k}, most, numbers),)
                ctx.target = whole if numbers == {} else replace(whole, tuning=Tuning(tuned))
                executor = backend.prepare(recorded, {}, {"T": m})  # holds the operands while they are read
                step = executor.work({"T": m})
                us = graph_ms(ctx, [w for _, work in step for w in work]) / args.layers * 1e3
                times.append((us, numbers))
            ctx.target = whole
            mine, floor = times[0][0], 2 * n * k / bandwidth * 1e6
            print(f"{text} m={m}: floor {floor:.2f} us, the chooser's {mine:.2f} ({floor / mine:.0%})")
            for us, numbers in sorted(times[1:], key=lambda t: t[0])[:SHOWN]:
                print(f"    {us:.2f} ({floor / us:.0%}) {numbers}", flush=True)


def program(n: int, k: int, residual: bool, layers: int) -> Program:
    b = Builder("gemms")
    x = b.input("x", "T", k, dtype="bf16")
    out = b.output("out", "T", n, dtype="bf16")
    for i in range(layers):
        w = b.weight(f"w{i}", n, k, dtype="bf16")
        if residual and i:
            b.emit(LINEAR_RESIDUAL, x=out, a=x, w=w)
        else:
            b.emit(LINEAR, out=out, a=x, w=w)
    return b.build()


def skinny(ctx: CudaContext, m: int, n: int, k: int, residual: bool) -> Iterator[dict[str, Any]]:
    """Shares that fit, as Shares takes them."""
    info = ctx.target.info
    for splits, filled in FILLED.items():
        parts = int(info.num_sms * filled) // splits
        for rounds in (1, 2) if splits == 1 else (1,):
            rows = even_rows(n, parts * rounds)
            for wide, depth_x in ((1, 8), (1, 4), (2, 4)):
                fits = 32 <= rows <= 64 * MAX_BLOCKS and skinny_choice(
                    "bf16", m, n, k, info, rows=rows, splits=splits, wide=wide, depth_x=depth_x,
                    residual=residual, early=m <= 32,
                )  # fmt: skip
                if fits:
                    yield {
                        "rows": rows, "splits": splits, "wide": wide, "depth_x": depth_x, "early": m <= 32
                    }  # fmt: skip


def wide(ctx: CudaContext, m: int, n: int, k: int, residual: bool) -> Iterator[dict[str, Any] | None]:
    """Likewise, as Cut takes them; and the library."""
    info = ctx.target.info
    yield None
    for splits in (1, 2, 3, 4):
        even = even_rows(n, info.num_sms // splits)
        for rows in sorted({even, 40, 64, 88}):
            if not 60 <= -(-n // rows) * splits <= 2 * info.num_sms:
                continue
            for depth_x in (2, 3, 4):
                fits = wide_choice(
                    "bf16", m, n, k, info, rows=rows, splits=splits, depth_x=depth_x, residual=residual
                )
                if fits:
                    yield {"rows": rows, "splits": splits, "depth_x": depth_x}


def even_rows(n: int, parts: int) -> int:
    return -(-n // (8 * parts)) * 8


if __name__ == "__main__":
    main()
