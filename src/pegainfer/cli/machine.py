"""What a measurement must say about where it was made: CPU, read bandwidth, commit, command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

BANDWIDTH_BYTES = 512 << 20  # well beyond any last-level cache share of a small machine
BANDWIDTH_RUNS = 5


def cpu_model() -> str:
    """The processor's name as the kernel knows it, e.g. 'AMD EPYC 7B13'."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_bandwidth(threads: int) -> float:
    """Best GB/s (10⁹ bytes) of some sweeps that read one large array on `threads` threads.

    The maximum of uint64 is one vector load and one compare a word, so memory is what bounds it.
    """
    import numpy as np

    data = np.ones(BANDWIDTH_BYTES // 8, np.uint64)
    best = 0.0
    for _ in range(BANDWIDTH_RUNS):
        workers = [threading.Thread(target=part.max) for part in np.array_split(data, threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, BANDWIDTH_BYTES / (time.perf_counter() - start) / 1e9)
    return best


def process_age() -> float:
    """Seconds since the kernel started this process, to the kernel's tick (10 ms)."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): ticks after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def commit() -> str | None:
    """Short commit of the checkout that this module belongs to, '+' after it if there are local changes.

    None where the package is installed, even inside somebody else's checkout.
    """
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    try:
        for command in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty=+"]):
            done = subprocess.run([*git, *command], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def provenance(threads: int) -> dict[str, Any]:
    """The fields that every result line starts with. Takes about a second: it measures the bandwidth."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "command": _command(),
        "cpu": cpu_model(),
        "cores": num_cores(),
        "threads": threads,
        "read_gb_s": round(read_bandwidth(threads), 1),
    }


def _command() -> str:
    """What was typed, but for where the checkout lies."""
    program = Path(sys.argv[0])
    name = ["python", f"bench/{program.name}"] if program.parent.name == "bench" else ["pegainfer"]
    return shlex.join([*name, *sys.argv[1:]])


def append_result(path: Path, row: dict[str, Any]) -> None:
    """Adds one JSON line to a results file, which is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write(json.dumps(row, ensure_ascii=False) + "\n")
