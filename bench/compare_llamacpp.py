"""Alternates llama.cpp and pegainfer on the same GGUF files in one go; prints medians and their ratios.

llama.cpp runs through `bench/peer_llamacpp.py` in an interpreter of its own, pegainfer through
`pegainfer bench engine` in this one. Each turn starts a process of either, so that a noisy moment of the
machine touches both.

    python bench/compare_llamacpp.py PEER_PYTHON model.gguf … [--case decode] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEER = Path(__file__).with_name("peer_llamacpp.py")


@dataclass(frozen=True)
class Case:
    """`sequences` prompts of `prompt` tokens, then `steps` decode steps of all."""

    prompt: int
    steps: int
    sequences: int = 1


CASES = {
    "short": Case(512, 128),
    "batch": Case(16, 64, 8),
    "long": Case(4000, 64),
}


def peer(python: str, model: str, case: Case, threads: int) -> dict[str, float]:
    """Tokens a second of llama.cpp: keys 'prefill' and 'decode'."""
    sizes = {"--prompt": case.prompt, "--steps": case.steps, "--sequences": case.sequences}
    command = [python, str(PEER), model, "--threads", str(threads)]
    found = json.loads(_output(command + [str(x) for pair in sizes.items() for x in pair]))
    return {"prefill": found["prefill_tok_s"], "decode": found["decode_tok_s"]}


def ours(model: str, case: Case, threads: int, extra: list[str]) -> dict[str, dict[str, Any]]:
    """What `pegainfer bench engine` says of the same: its rows by the same keys, 'tok_s' in each."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "pegainfer.cli.main", "bench", "engine", model, "--no-by-op"]
        command += ["--threads", str(threads), "--rounds", "1", "--output", str(rows)]
        command += ["--prefill", str(case.prompt), "--batch", str(case.sequences)]
        command += ["--context", str(case.prompt), "--decode", str(case.steps), *extra]
        _output(command)
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    return {row["case"]: row for row in found}


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer_python", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("models", nargs="+", help="GGUF files")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args, extra = parser.parse_known_args()
    print(f"medians of {args.rounds} alternating runs, tok/s; load {os.getloadavg()[0]:.1f}")
    print(f"{'model':18} {'case':26} {'llama.cpp':>9} {'pegainfer':>9} {'ratio':>6}")
    for model in args.models:
        for name in args.case or CASES:
            case = CASES[name]
            pairs = []
            for _ in range(args.rounds):
                theirs = peer(args.peer_python, model, case, args.threads)
                rows = ours(model, case, args.threads, extra)
                pairs.append((theirs, {kind: row["tok_s"] for kind, row in rows.items()}))
            for kind in ("prefill", "decode") if case.sequences == 1 else ("decode",):
                a, b = (statistics.median(run[kind] for run in side) for side in zip(*pairs, strict=True))
                label = f"{kind} {case.prompt}+{case.steps} × {case.sequences}"
                print(f"{Path(model).stem[-18:]:18} {label:26} {a:9.1f} {b:9.1f} {b / a:6.2f}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
