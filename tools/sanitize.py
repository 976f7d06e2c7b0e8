"""The kernel tests under compute-sanitizer, in many processes side by side; ends with one line for each.

    python tools/sanitize.py racecheck [--jobs 15] [--seconds 240] [--logs FOLDER] [PATHS]

A process checks a few tests. They wait for the sanitizer on the host most of the time, so that sixteen share
one GPU well: minutes, where one process takes an hour. Exit status 0: every test has ended, none with a
finding in a kernel of ours.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PATHS = (
    "tests/gpu/kernels", "tests/gpu/lower", "tests/gpu/runtime", "tests/gpu/models/test_repeats.py",
    "tests/gpu/models/test_random_plans.py",
)  # fmt: skip
# --report-api-errors: some tests provoke errors.
SANITIZER = ("compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", "9", "--tool")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
# One thread each, as the cores are shared; all kernels and edges at small sizes (tests/gpu/harness.py).
ENVIRONMENT = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "PEGAINFER_SMALL_SHAPES"), "1")
# Tests a process, by the first pattern that a name has; the slowest come first and start first.
SHARDS = {
    "racecheck": (
        ("test_repeats", 1),
        (r"float32_matches_the_reference\[sample\]", 1),
        # They share what takes longest, the captures.
        ("test_executor.*(a_graph_gives|steps_repeat|row_alone|alike_alone)", 8),
        ("test_executor", 1),
        ("test_row_pass", 3),
        ("a_row_alone", 2),
        ("test_sampling", 1),
        ("float32.*(sample_tokens|adjust|token_log|linear|gate|qkv|lm_head)", 1),
        ("sixteen.*(linear|gate|qkv|lm_head|attention)", 2),
        (r"rows_together.*kv_heads=40", 1),
        ("test_append", 2),
        ("test_ops", 6),
        ("", 4),
    ),
    "memcheck": (
        ("test_random_plans", 1),
        ("test_repeats", 2),
        ("test_executor", 5),
        ("test_row_pass", 5),
        ("", 20),
    ),
}
# Racecheck keeps tens of GB of the host's memory for graphs that are launched again and again, and has
# nothing to look at in the driver's own calls.
LEFT_OUT = {"racecheck": "test_random_plans|in graphs|gpu/runtime", "memcheck": "$^"}
# cuBLASLt's kernels, in which racecheck names hazards. (Excluding them by name breaks racecheck.)
FOREIGN = "nvjet"


@dataclass(frozen=True)
class Verdict:
    """What one process found. `ours`, `foreign`: kernels that were named."""

    passed: int
    summary: str
    ours: frozenset[str]
    foreign: frozenset[str]

    def clean(self, tests: int) -> bool:
        nothing = self.summary.startswith(("0 errors", "0 hazards"))
        return self.passed == tests and not self.ours and (nothing or bool(self.summary and self.foreign))

    def __str__(self) -> str:
        parts = [self.summary or "did not end"]
        parts += [f"ours: {' '.join(sorted(self.ours))}"] if self.ours else []
        parts += [f"{len(self.foreign)} kernels of cuBLASLt's"] if self.foreign else []
        return "; ".join(parts)


def shards(tool: str, names: Sequence[str]) -> list[list[str]]:
    """The tests of each process."""
    left = [n for n in names if not re.search(LEFT_OUT[tool], n)]
    found = []
    for pattern, size in SHARDS[tool]:
        mine = [n for n in left if re.search(pattern, n)]
        left = [n for n in left if n not in mine]
        found += [mine[i : i + size] for i in range(0, len(mine), size)]
    return found


def judge(text: str) -> Verdict:
    """Reads the output of a process; one that was killed has no summary."""
    named = set(re.findall(r"^=========     at (\w+)\+0x", text, re.M))  # memcheck
    named |= set(re.findall(r"access at (\w+)\+0x", text))  # racecheck
    passed = re.findall(r"(\d+) passed", text)
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
    foreign = frozenset(n for n in named if n.startswith(FOREIGN))
    whole = bool(summaries) and "didn't terminate" not in text and "Internal Sanitizer Error" not in text
    return Verdict(
        int(passed[-1]) if passed else 0, summaries[-1] if whole else "", frozenset(named) - foreign, foreign
    )


def collect(paths: Sequence[str]) -> list[str]:
    command = (*PYTEST, "--collect-only", "-q", *paths)
    listed = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    names = [line for line in listed.stdout.splitlines() if "::" in line and "[10000]" not in line]
    if listed.returncode or not names:
        raise SystemExit(listed.stdout[-2000:] + listed.stderr[-2000:])
    return names


def check(tool: str, tests: Sequence[str], log: Path, seconds: float) -> Verdict:
    """Runs them in a process of their own, killed after so many seconds."""
    command = (
        *SANITIZER,
        tool,
        *PYTEST,
        "-v",
        "--durations=0",
        "--basetemp",
        str(log.with_suffix("")),
        *tests,
    )
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return judge(log.read_text(errors="replace"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tool", choices=sorted(SHARDS))
    parser.add_argument("paths", nargs="*", default=PATHS)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument(
        "--seconds", type=float, default=600, help="after which all that still runs is killed"
    )
    parser.add_argument("--logs", type=Path, default=None)
    args = parser.parse_intermixed_args()
    folder = args.logs or Path(tempfile.mkdtemp(prefix="sanitize-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    parts = shards(args.tool, collect(args.paths))

    def one(number: int) -> tuple[int, float, Verdict]:
        start = time.monotonic()
        log = folder / f"{args.tool}-{number:02}.txt"
        verdict = check(args.tool, parts[number], log, args.seconds - (start - began))
        return number, time.monotonic() - start, verdict

    clean = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for number, took, v in pool.map(one, range(len(parts))):
            tests = parts[number]
            good = v.clean(len(tests))
            clean += len(tests) if good else 0
            print(
                f"{number:3} {'ok ' if good else 'BAD'} {took:4.0f} s  {v.passed} of {len(tests)} passed; "
                f"{v}  {tests[0].rpartition('/')[2]}"
            )
    total = sum(map(len, parts))
    print(f"{args.tool}: {clean} of {total} tests clean, {time.monotonic() - began:.0f} s; logs in {folder}")
    return 0 if clean == total else 1


if __name__ == "__main__":
    sys.exit(main())
