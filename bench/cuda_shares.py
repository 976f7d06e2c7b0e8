"""Decode steps of a model with dummy weights, by the tiles and splits of one weight's GEMM.

python bench/cuda_shares.py FOLDER --shape 5120x2048 --shares 80x2 40x1 [--batch 1 8] [--context 1024]

--shape: rows and columns of a weight, as sm90/gemm/skinny.cuh takes it.
--shares: rows of a tile and splits of the columns (lower/cuda/skinny.py: Shares). The first line printed is
for what the chooser picks. Steps of one row run as separate launches, without the one-launch pass.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuda_steps import STEPS, Bench

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.engine.config import SchedulerConfig
from pegainfer.lower.cuda import planning, row_pass, skinny
from pegainfer.lower.cuda.target import Target

chosen = skinny.shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--shares", nargs="+", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    shape = tuple(int(n) for n in args.shape.split("x"))
    planning.RULES = tuple(rule for rule in planning.RULES if rule is not row_pass.ONE_LAUNCH)
    for shares in (None, *(tuple(int(n) for n in text.split("x")) for text in args.shares)):
        skinny.shares = picker(shape, shares) if shares else chosen
        times = ", ".join(f"{batch}: {ms:.3f} ms" for batch, ms in steps(args).items())
        print(f"{args.shape} in {shares or 'the chosen shares'}: {times}")


def picker(shape: tuple[int, ...], shares: tuple[int, ...]) -> Any:
    """A chooser that gives weights of the shape these shares."""

    def pick(m: int, n: int, k: int, target: Target, op: str = "skinny") -> tuple[skinny.Shares | None, str]:
        found, why = chosen(m, n, k, target, op)
        if (n, k) != shape:
            return found, why
        return replace(found or skinny.Shares(shares[0]), rows=shares[0], splits=shares[1]), "given"

    return pick


def steps(args: argparse.Namespace) -> dict[int, float]:
    """Milliseconds of the device by batch, medians over many steps."""
    length = args.context + STEPS + 16
    config = EngineConfig(backend="cuda", load_format="dummy", max_model_len=length)
    engine = build_engine(args.folder, args.folder.name, config, SchedulerConfig(max_slots=max(args.batch)))
    bench, found = Bench(engine.runner, length), {}
    for batch in args.batch:
        for slot in range(batch):
            bench.prefill(slot, args.context, 100 + slot)
        found[batch] = bench.decode(batch, args.context)["device_ms"]
        bench.start(frees=tuple(range(batch))).wait()
    engine.runner.close()
    return found


if __name__ == "__main__":
    main()
