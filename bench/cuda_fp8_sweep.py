"""Which shares of an FP8 weight are quickest at Qwen3-4B's decode shapes, on this GPU.

    python bench/cuda_fp8_sweep.py [--rows 1 16 32 128] [--only qkv o gate_up down]

Measures as cuda_fp8.py does and prints the quickest launches beside the chooser's own, in the form in which
cards.json has them: op skinny_fp8 up to 32 rows, op fp8 above.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cuda_decode import graph_ms, read_bandwidth
from cuda_fp8 import SHAPES, program

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.fp8 import COLUMNS, GROUP, LEAST_GROUPS, MOST_SPLITS, TOKENS
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.skinny import FILLED, MAX_BLOCKS, MAX_FP8_TOKENS, Shares, skinny_choice
from pegainfer.lower.cuda.store import Dummy
from pegainfer.lower.cuda.target import Tuned, Tuning

FORM = "fp8_r128"
SHOWN = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 128])
    parser.add_argument("--only", nargs="+", default=[name for name, _, _ in SHAPES])
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s")
    whole = ctx.target
    for name, n, k in SHAPES:
        if name not in args.only:
            continue
        recorded = program(name, n, k, FORM, args.layers)
        backend = CudaBackend(ctx, {}, CudaOptions(), Dummy())
        backend.prepare(recorded, {}, {"T": max(args.rows)}).work({"T": 1})
        backend.load()
        rows = 2 * n if name == "gate_up" else n
        for m in args.rows:
            times: list[tuple[float, dict[str, Any] | None]] = []
            op, found = "skinny_fp8", candidates(ctx, m, rows, k)
            if m > MAX_FP8_TOKENS:
                op, found = "fp8", tiles(m, rows, k, whole.info.num_sms)
            for numbers in [{}, *found, None]:  # None: the kernel for many rows, for few as well
                tuned = (Tuned("", whole.info.arch, op, {"n": rows, "k": k}, m, numbers),)
                ctx.target = whole if numbers == {} else replace(whole, tuning=Tuning(tuned))
                executor = backend.prepare(recorded, {}, {"T": m})
                step = executor.work({"T": m})
                us = graph_ms(ctx, [w for _, work in step for w in work]) / args.layers * 1e3
                times.append((us, numbers))
            mine = times[0][0]
            floor = rows * k / bandwidth * 1e6
            print(f"{name} m={m}: floor {floor:.2f} us, the chooser's {mine:.2f} ({floor / mine:.0%})")
            for us, numbers in sorted(times[1:], key=lambda t: t[0])[:SHOWN]:
                print(f"    {us:.2f} ({floor / us:.0%}) {numbers}", flush=True)
        ctx.target = whole


def tiles(m: int, n: int, k: int, sms: int) -> Iterator[dict[str, Any]]:
    """Tiles of many rows, as choose_fp8 takes them; splits of k as far as they find SMs that are idle."""
    for columns in COLUMNS:
        count = -(-m // TOKENS) * -(-n // columns)
        for splits in range(1, min(MOST_SPLITS, k // GROUP // LEAST_GROUPS) + 1):
            if splits == 1 or count * splits <= sms:
                yield {"columns": columns, "splits": splits}


def candidates(ctx: CudaContext, m: int, n: int, k: int) -> Iterator[dict[str, Any]]:
    """Shares that fit, as Shares takes them."""
    info = ctx.target.info
    shares = []
    for splits, filled in FILLED.items():
        parts = int(info.num_sms * filled) // splits
        shares += [
            (-(-n // (8 * parts * rounds)) * 8, splits) for rounds in ((1, 2, 3) if splits == 1 else (1,))
        ]
    for rows, splits in shares:
        for wide in (1, 2):
            for depth_x in (2, 4, 8):
                s = Shares(rows, splits, wide, depth_x)
                fits = rows <= 64 * MAX_BLOCKS and skinny_choice(
                    "bf16", m, n, k, info, rows=rows, splits=splits, wide=wide, depth_x=depth_x,
                    weights="fp8_rows",
                )  # fmt: skip
                if fits:
                    yield {"rows": s.rows, "splits": s.splits, "wide": s.wide, "depth_x": s.depth_x}


if __name__ == "__main__":
    main()
