"""Which shares of a weight are quickest at Qwen3-4B's decode shapes, on this GPU.

    python bench/cuda_skinny_sweep.py [--rows 1 16 32 64] [--only qkv o gate_up down] [--form fp8_r128]
        [--ranks 2]

Measures as cuda_fp8.py does and prints the quickest launches beside the chooser's own, in the form in which
cards.json has them (op skinny, or skinny_fp8). --ranks: the shapes of one of several ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from cuda_decode import graph_ms, read_bandwidth
from cuda_fp8 import SHAPES, program

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.skinny import FILLED, MAX_BLOCKS, Shares, skinny_choice
from pegainfer.lower.cuda.store import Dummy
from pegainfer.lower.cuda.target import Tuned, Tuning

SHOWN = 4
MODELS = {  # name, n, k; gate_up's n is that of each
    "4b": (*SHAPES, ("head", 151_936, 2560)),
    "8b": (
        ("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 12288, 4096), ("down", 4096, 12288),
        ("head", 151_936, 4096),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--only", nargs="+", default=[name for name, _, _ in MODELS["4b"]])
    parser.add_argument("--model", default="4b", choices=MODELS)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--form", default="bf16", choices=["bf16", "fp8_r128"])
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    ctx = CudaContext()
    bandwidth = read_bandwidth(ctx)
    print(f"{ctx.describe()}; read bandwidth {bandwidth / 1e12:.2f} TB/s")
    whole = ctx.target
    op, weights = ("skinny", "") if args.form == "bf16" else ("skinny_fp8", "fp8_rows")
    for name, n, k in MODELS[args.model]:
        if name not in args.only:
            continue
        shared = name in ("o", "down")  # whose columns ranks divide
        n, k = (n, k // args.ranks) if shared else (n // args.ranks, k)
        out = "f32" if (shared and args.ranks > 1) or name == "head" else "bf16"
        recorded = program(name, n, k, args.form, args.layers, out)
        backend = CudaBackend(ctx, {}, CudaOptions(), Dummy())
        backend.prepare(recorded, {}, {"T": max(args.rows)}).work({"T": 1})
        backend.load()
        rows = 2 * n if name == "gate_up" else n
        for m in args.rows:
            times: list[tuple[float, dict[str, Any]]] = []
            for numbers in [{}, *candidates(ctx, m, rows, k, weights)]:
                tuned = (Tuned("", whole.info.arch, op, {"n": rows, "k": k}, 64, numbers),)
                ctx.target = replace(whole, tuning=Tuning(tuned)) if numbers else whole
                executor = backend.prepare(recorded, {}, {"T": m})
                step = executor.work({"T": m})
                us = graph_ms(ctx, [w for _, work in step for w in work]) / args.layers * 1e3
                times.append((us, numbers))
            mine = times[0][0]
            floor = rows * k * (2 if args.form == "bf16" else 1) / bandwidth * 1e6
            print(f"{name} m={m}: floor {floor:.2f} us, the chooser's {mine:.2f} ({floor / mine:.0%})")
            for us, numbers in sorted(times[1:], key=lambda t: t[0])[:SHOWN]:
                print(f"    {us:.2f} ({floor / us:.0%}) {numbers}", flush=True)
        ctx.target = whole


def candidates(ctx: CudaContext, m: int, n: int, k: int, weights: str) -> Iterator[dict[str, Any]]:
    """Shares that fit, as Shares takes them."""
    info = ctx.target.info
    shares = []
    for splits, filled in FILLED.items():
        parts = int(info.num_sms * filled) // splits
        shares += [
            (-(-n // (8 * parts * rounds)) * 8, splits) for rounds in ((1, 2, 3) if splits == 1 else (1,))
        ]
    many = [(rows, 1) for rows in (64, 96, 128, 152, 192)]  # a head has many tiles a block
    for rows, splits in many if n > 2 * 192 * info.num_sms else shares:
        for wide in (1, 2):
            for depth_x, early, per_sm in product(
                (4, 8), (True, False) if splits > 1 else (True,), (1, 2) if splits == 1 else (2,)
            ):
                s = Shares(rows, splits, wide, depth_x, early, per_sm)
                fits = rows <= 64 * MAX_BLOCKS and skinny_choice(
                    "bf16", m, n, k, info, rows=rows, splits=splits, wide=wide, depth_x=depth_x,
                    early=early, per_sm=per_sm, weights=weights,
                )  # fmt: skip
                if fits:
                    yield {
                        "rows": s.rows, "splits": s.splits, "wide": s.wide, "depth_x": s.depth_x,
                        "early": s.early, "per_sm": s.per_sm,
                    }  # fmt: skip


if __name__ == "__main__":
    main()
