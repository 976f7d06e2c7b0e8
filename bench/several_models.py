"""Several models in one server: time of a switch, memory, and what a load costs the traffic beside it.

    python bench/several_models.py --models 5

Every model is the default one under a name of its own, so that the differences are those of the server. The
traffic is one stream at a time on the first model; runs with a load beside them alternate with runs without.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from pegainfer.app.cache import cached_model
from pegainfer.frontend.processes import memory_of, process_family

ADMIN = {"authorization": "Bearer bench"}
TOKENS = 256  # of a stream
PROMPT = "Once upon a time there was a small engine that"


@contextlib.contextmanager
def serving(models: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """URL and process id of a server over a folder of models."""
    command = [
        sys.executable,
        "-m",
        "pegainfer.cli.main",
        "serve",
        "--models-dir",
        str(models),
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        [*command, "--admin-key", "bench", "--max-model-len", "2048", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("listening on "):
                yield line.split()[-1], process.pid
                return
        raise SystemExit("the server did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def stream(url: str, model: str, tokens: int) -> tuple[list[float], int]:
    """Arrival times in seconds from the request on, one a token, and how many tokens came."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    begin, times, came = time.perf_counter(), [], 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if chunk.get("usage"):
                    came = chunk["usage"]["completion_tokens"]
                else:
                    times.append(time.perf_counter() - begin)
    return times, came


def admin(url: str, what: str, model: str) -> None:
    answer = httpx.post(f"{url}/admin/models/{what}", json={"model": model}, headers=ADMIN, timeout=600)
    answer.raise_for_status()


def switches(url: str, pid: int, names: list[str]) -> None:
    """Prints the first token's time of each model when it is loaded for it, and when it is there."""
    print("| models loaded | first token, loading | first token, loaded | memory |\n|---|---|---|---|")
    for number, name in enumerate(names, start=1):
        cold = stream(url, name, 1)[0][0]
        warm = statistics.median(stream(url, name, 1)[0][0] for _ in range(5))
        memory = memory_of(process_family(pid)) / 2**20
        print(f"| {number} | {cold:.2f} s | {1000 * warm:.0f} ms | {memory:.0f} MiB |", flush=True)


def beside(url: str, busy: str, other: str, rounds: int) -> None:
    """Prints how long streams take with a load of another model beside them, and without."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    gaps: dict[bool, list[float]] = {False: [], True: []}
    lost = 0
    with ThreadPoolExecutor(1) as pool:
        for number in range(2 * rounds):
            loads = number % 2 == 1
            admin(url, "unload", other)
            load = pool.submit(admin, url, "load", other) if loads else None
            times, came = stream(url, busy, TOKENS)
            if load is not None:
                load.result()
            lost += TOKENS - came
            seconds[loads].append(times[-1])
            gaps[loads].append(max(b - a for a, b in itertools.pairwise(times)))
    plain, loaded = (statistics.median(seconds[k]) for k in (False, True))
    longest = [1000 * statistics.median(gaps[k]) for k in (False, True)]
    print(f"\n{rounds} streams of {TOKENS} tokens each, medians:")
    print(f"alone {plain:.3f} s, beside a load {loaded:.3f} s ({100 * (loaded / plain - 1):+.1f}%)")
    print(f"longest gap between tokens {longest[0]:.0f} and {longest[1]:.0f} ms; {lost} tokens lost")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7, help="streams with a load beside them")
    given = parser.parse_args()
    path = cached_model()
    if path is None:
        raise SystemExit("run `pegainfer pull` first")
    names = [f"m{i}" for i in range(1, given.models + 1)]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / f"{name}.gguf").symlink_to(path)
        with serving(Path(folder)) as (url, pid):
            switches(url, pid, names)
            beside(url, names[0], names[1], given.rounds)


if __name__ == "__main__":
    main()
