"""A dense model behind HTTP on one GPU, row by row beside its peer, the floor and the aim.

    python bench/serving_table.py FOLDER [--rows 8 32 poisson ttft] [--serve=--target-itl-ms=50]

Starts `pegainfer serve FOLDER --device cuda --load-format dummy` on a loopback port and asks it with
`pegainfer bench serve`: prompts are token ids drawn fresh for each row, answers greedy and of full length. A
warm prompt is one that the server has answered before. Rows are for Qwen3-4B's sizes in bf16: floors, the
peer's figures (vLLM 0.26.0, FlashAttention 3, CUDA graphs, prefix cache; medians but for throughput) and aims
are those of an H100 that reads 3.08 TB/s. Prints the table last; every row is appended to
bench/results/serving.jsonl with card, read bandwidth, commit and command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_path import CLI, cpu_seconds, serving

from pegainfer.cli.machine import append_result, commit

IN, OUT = 1024, 128
VOCABULARY = 151_000  # ids below it are in the model's vocabulary
SPEED, TTFT, TPOT = "output_throughput", "median_ttft_ms", "median_tpot_ms"


@dataclass(frozen=True)
class Aim:
    """What one figure of a row is held against; None where there is no such thing."""

    key: str  # of the bench's result
    floor: float | None
    peer: float | None
    bar: float
    goal: float | None

    def reached(self, value: float) -> str:
        more = self.key == SPEED
        if self.goal is not None and (value >= self.goal if more else value <= self.goal):
            return "goal"
        return "bar" if (value >= self.bar if more else value <= self.bar) else "SHORT"


@dataclass(frozen=True)
class Row:
    """One run of the client."""

    name: str
    flags: dict[str, Any]  # of `bench serve`
    aims: tuple[Aim, ...]


def clients(n: int, prompts: int, aims: tuple[Aim, ...]) -> Row:
    flags = {"num-prompts": prompts, "max-concurrency": n, "num-warmups": n, "seed": n}
    return Row(str(n), flags, aims)


def first_tokens(
    length: int, floor: float, cold: tuple[float, float], warm: tuple[float, float]
) -> list[Row]:
    """The same prompts twice. `cold`, `warm`: the peer's median (the bar) and the goal, in ms."""
    flags = {
        "num-prompts": 7, "max-concurrency": 1, "num-warmups": 2, "seed": length,
        "random-input-len": length, "random-output-len": 1,
    }  # fmt: skip
    return [
        Row(f"ttft cold {length}", flags, (Aim(TTFT, floor, cold[0], cold[0], cold[1]),)),
        Row(f"ttft warm {length}", flags, (Aim(TTFT, None, warm[0], warm[0], warm[1]),)),
    ]


def alone(length: int, floor: float, peer: float, goal: float) -> Row:
    flags = {"num-prompts": 4, "max-concurrency": 1, "num-warmups": 1, "seed": 7 + length,
             "random-input-len": length}  # fmt: skip
    return Row(f"alone {length}", flags, (Aim(TPOT, floor, peer, peer, goal),))


ROWS = [
    alone(1024, 2.66, 4.38, 2.95),
    alone(16_000, 3.4, 5.01, 3.8),
    *first_tokens(128, 3, (17.8, 6), (17.8, 6)),
    *first_tokens(1024, 10, (38.7, 14), (15.7, 5)),
    *first_tokens(4096, 44, (71.9, 52), (20.3, 6)),
    *first_tokens(16_000, 270, (358, 310), (51.7, 9)),
    clients(8, 48, (Aim(SPEED, 2170, 1280, 1.2 * 1280, 1800),)),
    clients(32, 144, (Aim(SPEED, 4630, 3026, 1.2 * 3026, 4000),)),
    clients(64, 256, (Aim(SPEED, 5700, 4030, 4030, 5000),)),
    clients(128, 384, (Aim(SPEED, 6450, 4670, 4670, 5700),)),
    clients(256, 640, (Aim(SPEED, 6900, 5015, 5015, 6200), Aim("p99_itl_ms", None, 141, 80, None))),
    Row("poisson", {"num-prompts": 250, "request-rate": 16, "num-warmups": 16, "seed": 16}, (
        Aim(TTFT, None, 102, 102, 40), Aim("p99_ttft_ms", None, 214, 214, 90),
        Aim(TPOT, None, 11.3, 11.3, 6), Aim("p99_tpot_ms", None, 17.7, 17.7, None),
    )),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with config.json and the tokenizer")
    parser.add_argument("--rows", nargs="+", default=[""], help="rows whose names begin so; all by default")
    parser.add_argument("--serve", action="append", default=[], help="a flag of `serve`; may be repeated")
    parser.add_argument("--commit", default=commit(), help="where the checkout has no history")
    parser.add_argument("--output", type=Path, default=Path("bench/results/serving.jsonl"))
    options = parser.parse_args()
    rows = [
        row
        for row in ROWS
        if any(row.name == p or row.name.startswith(p + " ") or not p for p in options.rows)
    ]
    card = {"commit": options.commit, **_card()}
    print(card)
    command = [
        *CLI, "serve", str(options.folder), "--device", "cuda", "--load-format", "dummy", "--port", "0",
        "--max-model-len", "20000", *options.serve,
    ]  # fmt: skip
    table = []
    with serving(command) as (port, pid):
        for row in rows:
            found = measure(row, port, pid)
            print(_told(row, found), flush=True)
            append_result(options.output, {**card, "serve": options.serve, "row": row.name, **found})
            table += [_cells(row, aim, found) for aim in row.aims]
    print("| row | figure | floor | peer | bar | goal | here | |\n|---|---|---|---|---|---|---|---|")
    print(*table, sep="\n")


def _card() -> dict[str, Any]:
    """The GPU and how fast it reads, measured before the server takes its memory."""
    from pegainfer.app.config import EngineConfig
    from pegainfer.app.gpu import describe, read_bandwidth

    config = EngineConfig(backend="cuda")
    return {
        "device": describe(config).split(", ")[0].removeprefix("cuda ("),
        "read_gb_s": round(read_bandwidth(config)),
    }


def measure(row: Row, port: int, pid: int) -> dict[str, Any]:
    """One run of the client: its figures, and CPU seconds of the front (`pid`) and of the engine."""
    flags = {
        "port": port, "vocab-size": VOCABULARY, "random-input-len": IN, "random-output-len": OUT,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el", "metric-percentiles": "50,99",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        flags |= row.flags | {"result-dir": folder, "result-filename": "r.json"}
        command = [*CLI, "bench", "serve", "--ignore-eos", "--save-result"]
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        processes = {"front": pid, "engine": _children(pid)[0]}
        before = {name: cpu_seconds(p) for name, p in processes.items()}
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True
        )
        used = {f"{name}_cpu_seconds": cpu_seconds(p) - before[name] for name, p in processes.items()}
        result: dict[str, Any] = json.loads((Path(folder) / "r.json").read_text())
    if result["failed"]:
        raise SystemExit(f"row {row.name}: {result['failures']}")
    result["notes"] = done.stderr.strip()
    result["client_command"] = "pegainfer " + shlex.join(command[len(CLI) :])
    return result | used


def _children(pid: int) -> list[int]:
    """Process ids, the eldest first; the first one of a server is its engine."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(stat.parent.name))
    if not found:
        raise SystemExit(f"process {pid} has no engine process")
    return sorted(found)


def _told(row: Row, r: dict[str, Any]) -> str:
    """Where the time went: device, host by stage, front, client."""
    steps = max(1, r["server_steps"])
    stages = ", ".join(
        f"{name} {seconds / steps * 1e6:.0f}" for name, seconds in r["server_host_seconds"].items()
    )
    kinds = ", ".join(f"{n} {kind} of {s / n * 1e3:.2f} ms" for kind, (n, s) in r["server_kinds"].items())
    latencies = ", ".join(
        f"{name} {r[f'mean_{name}_ms']:.2f}/{r[f'median_{name}_ms']:.2f}/{r[f'p99_{name}_ms']:.2f}"
        for name in ("ttft", "tpot", "itl")
    )
    lines = [
        f"{row.name}: {r['output_throughput']:.0f} tok/s in {r['duration']:.2f} s; ms mean/median/P99: "
        f"{latencies}",
        f"  device in steps {r['server_step_seconds'] / r['duration']:.1%}: {kinds}; "
        f"cached {100 * (r['server_cached_share'] or 0):.0f}%",
        f"  host µs a step: {stages}",
        f"  CPU s, warm-ups included: front {r['front_cpu_seconds']:.2f}, engine "
        f"{r['engine_cpu_seconds']:.2f}; client {r['client_cpu_seconds']:.2f} in {r['client_processes']} "
        f"(busiest {r['client_busiest_core_share']:.0%}, lag {r['client_p99_lag_ms']:.1f} ms) of "
        f"{os.cpu_count()} cores",
    ]
    return "\n".join(lines + [f"  {note}" for note in r["notes"].splitlines()])


def _cells(row: Row, aim: Aim, found: dict[str, Any]) -> str:
    figures = [aim.floor, aim.peer, aim.bar, aim.goal, found[aim.key]]
    shown = ["–" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in figures]
    return " ".join(f"| {cell}" for cell in [row.name, aim.key, *shown, aim.reached(found[aim.key])]) + " |"


if __name__ == "__main__":
    sys.exit(main())
