"""Every figure of the CPU in one go on a quiet machine: beside llama.cpp, start-up, a step by op, the ledger.

    python bench/cpu_figures.py PEER_PYTHON [--rounds 3] [--part peer] [--part startup] …

PEER_PYTHON is the interpreter of an environment with llama-cpp-python built from source (peer_llamacpp.py).
Files that are not there are requantised from the default model by llama.cpp into build/figures. About eleven
minutes on two cores. Writes docs/cpu-figures.md; the part `ledger` replaces the CPU's rows of the kernels'
ledger and makes docs/kernels-cpu.md anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from compare_llamacpp import CASES, PEER, Case, ours, peer  # noqa: E402

from pegainfer.app.resolve import resolve  # noqa: E402
from pegainfer.measure import ledger, report  # noqa: E402
from tests.support.tinymodel import Tiny, write_gguf  # noqa: E402

FILES = ROOT / "build" / "figures"
PAGE = ROOT / "docs" / "cpu-figures.md"
NAME = "SmolLM2-135M-Instruct"
FORMATS = ("Q4_1", "Q8_0", "BF16", "Q4_0")  # Q4_1 is the default model as shipped
PARTS = ("peer", "startup", "steps", "ledger")
PRODUCTS = ("embedding", "qkv_norm_rope_append", "linear_residual", "gate_up_swiglu", "lm_head")
# Widths of whole superblocks, which the default model has not.
SUPERBLOCKS = Tiny(
    "seeded-q4_k-q6_k",
    seed=15,
    config={
        "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 8192,
    },
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """What a figure's ratio to llama.cpp should be."""

    format: str
    case: str
    kind: str
    bar: float
    goal: str


BARS = (
    Bar("Q4_1", "short", "prefill", 1.5, "2.5"),
    Bar("Q4_1", "short", "decode", 1.3, "2"),
    Bar("Q8_0", "short", "prefill", 1.1, "1.5"),
    Bar("Q8_0", "short", "decode", 1.1, "90% of the roof"),
    Bar("BF16", "short", "prefill", 1.1, "1.5"),
    Bar("BF16", "short", "decode", 1.1, "90% of the roof"),
    Bar("Q4_0", "short", "decode", 1.1, "90% of the roof"),
    Bar("Q4_1", "batch", "decode", 2.0, "3"),
    Bar("Q8_0", "batch", "decode", 1.3, "2"),
    Bar("Q4_1", "long", "prefill", 1.1, "1.5"),
    Bar("Q4_1", "long", "decode", 1.1, "1.5"),
)


@dataclass(frozen=True)
class Figure:
    """Medians of alternating runs, tokens a second; `roof`: if reading what a step needs were all."""

    theirs: float
    ours: float
    roof: float | None

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def files(peer_python: str) -> dict[str, Path]:
    """A file of each format under the model's own name."""
    FILES.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in FORMATS:
        found[name] = FILES / f"{NAME}.{name}.gguf"
        if found[name].exists():
            continue
        shipped = resolve(NAME, fetch=True).path
        if name == "Q4_1":
            found[name].symlink_to(shipped)
        else:
            run([peer_python, str(PEER), str(shipped), "--quantize", f"{name}={found[name]}"])
    return found


def compare(peer_python: str, models: dict[str, Path], rounds: int) -> dict[Bar, Figure]:
    """Runs each file and case of BARS in turn on both engines."""
    figures: dict[Bar, Figure] = {}
    for fmt, case in dict.fromkeys((b.format, b.case) for b in BARS):
        theirs: list[dict[str, float]] = []
        rows: list[dict[str, dict[str, Any]]] = []
        for _ in range(min(rounds, 2) if case == "long" else rounds):
            theirs.append(peer(peer_python, str(models[fmt]), CASES[case], 2))
            rows.append(ours(str(models[fmt]), CASES[case], 2, []))
        for bar in (b for b in BARS if (b.format, b.case) == (fmt, case)):
            roofs = [r[bar.kind]["roof_tok_s"] for r in rows]
            figures[bar] = Figure(
                statistics.median(t[bar.kind] for t in theirs),
                statistics.median(r[bar.kind]["tok_s"] for r in rows),
                statistics.median(roofs) if None not in roofs else None,
            )
            say(f"{label(bar)}: {figures[bar].ratio:.2f} times llama.cpp")
    return figures


def label(bar: Bar) -> str:
    case: Case = CASES[bar.case]
    if bar.case == "batch":
        return f"{bar.format}, {case.sequences} sequences"
    text = f"prefill {case.prompt}" if bar.kind == "prefill" else f"decode {case.steps} after {case.prompt}"
    return f"{bar.format}, {text}"


def comparison(figures: dict[Bar, Figure]) -> Iterator[str]:
    yield "## Beside llama.cpp\n"
    yield "Two threads, medians of alternating runs in one go, tokens a second. *Roof*: what a decode would"
    yield "reach if reading its weights at the bandwidth measured in the same run were all.\n"
    yield "| file, case | llama.cpp | pegainfer | ratio | bar | goal | of the roof |"
    yield "|---|---|---|---|---|---|---|"
    for bar, f in figures.items():
        roof = f"{f.ours / f.roof:.0%}" if f.roof else "–"
        missed = "" if f.ratio >= bar.bar else " **missed**"
        yield (
            f"| {label(bar)} | {f.theirs:,.1f} | {f.ours:,.1f} | {f.ratio:.2f} | {bar.bar:g}{missed} | "
            f"{bar.goal} | {roof} |"
        )
    yield ""


def startup() -> Iterator[str]:
    rows = FILES / "startup.jsonl"
    rows.unlink(missing_ok=True)
    pega("bench", "startup", "--rounds", "5", "--output", str(rows))
    row = json.loads(rows.read_text())
    yield "## Ready, and how large\n"
    runs = row["ready_runs"]
    yield f"- ready after {row['ready_s']:.2f} s ({min(runs):.2f} to {max(runs):.2f}) with the model in the"
    yield "  page cache (bar 1.5, goal 0.8)"
    yield f"- PSS of all processes after one answer: {row['pss_mb']:.0f} MB (bar 350, goal 260)\n"


def steps(models: dict[str, Path]) -> Iterator[str]:
    """Where steps of bf16 weights and of a long context go."""
    yield "## Steps by op\n"
    for title, model, context in (("bf16", "BF16", 512), ("Q4_1 at 4,000 tokens", "Q4_1", 4000)):
        sizes = [
            "--prefill",
            "16",
            "--batch",
            "1",
            "--context",
            str(context),
            "--decode",
            "64",
            "--rounds",
            "1",
        ]
        said = pega("bench", "engine", str(models[model]), *sizes, "--output", os.devnull)
        first = said.splitlines()[0]
        yield f"### {title}\n\n{first}\n\n```"
        yield said[said.index("\ndecode 64 × 1: ") + 1 :].rstrip()
        yield "```\n"


def measure_ops(models: dict[str, Path]) -> None:
    """The CPU's rows of the ledger anew: all ops of the default model, products of the other formats."""
    rows = FILES / "ledger.jsonl"
    rows.unlink(missing_ok=True)
    wide = write_gguf(SUPERBLOCKS, FILES / f"{SUPERBLOCKS.name}.gguf", mixed)
    append = ["--append", "--ledger", str(rows.relative_to(ROOT))]  # the rows bear their command
    products = [text for op in PRODUCTS for text in ("--op", op)]
    say("ledger: the default model")
    pega("bench", "ops", NAME, *append)
    for path in (*(models[name] for name in FORMATS[1:]), wide):
        say(f"ledger: {path.stem}")
        pega("bench", "ops", str(path), *products, *append)
    kept = [
        line
        for line in ledger.LEDGER.read_text().splitlines()
        if not json.loads(line)["variant"].startswith("cpu.")
    ]
    ledger.LEDGER.write_text("".join(f"{line}\n" for line in (*rows.read_text().splitlines(), *kept)))
    ledger.read()
    report.main([])


def mixed(name: str) -> str:
    """Q6_K where quality asks for it, as in files called Q4_K_M."""
    return "q6_k" if name.startswith("token_embd") or "ffn_down" in name or "attn_v" in name else "q4_k"


def pega(*argv: str) -> str:
    return run([sys.executable, "-m", "pegainfer.cli.main", *argv])


def run(command: list[str]) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:5.0f} s  {text}", flush=True)


def head(load: float) -> Iterator[str]:
    from pegainfer.cli.machine import provenance

    where = provenance(2)
    yield "# CPU figures\n"
    yield "Made by `make figures PEER=…` (`bench/cpu_figures.py`); do not edit.\n"
    now = os.getloadavg()[0]
    yield (
        f"{where['cpu']}, {where['cores']} cores, 2 threads, reads {where['read_gb_s']} GB/s; commit "
        f"{where['commit']}, {where['time']}; load average {load:.1f} before, {now:.1f} at the end (two "
        "threads that compute are 2).\n"
    )


def write(parts: Iterable[Iterable[str]]) -> None:
    PAGE.write_text("\n".join(line for part in parts for line in part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer_python", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all; may be repeated")
    args = parser.parse_args()
    wanted, load = args.part or PARTS, os.getloadavg()[0]
    models = files(args.peer_python)
    parts: list[list[str]] = []
    if "peer" in wanted:
        parts.append(list(comparison(compare(args.peer_python, models, args.rounds))))
    if "startup" in wanted:
        say("start-up")
        parts.append(list(startup()))
    if "steps" in wanted:
        say("steps by op")
        parts.append(list(steps(models)))
    if parts:
        write([head(load), *parts])
    if "ledger" in wanted:
        measure_ops(models)
    say("done")


if __name__ == "__main__":
    main()
