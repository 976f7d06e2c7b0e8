"""Our server and llama.cpp's in turn on the same GGUF file, under the same load; prints medians and ratios.

    python bench/compare_llama_server.py --peer LLAMA_SERVER [MODEL] [--clients 8 16] [--rounds 3]

LLAMA_SERVER is llama.cpp's `llama-server`. Each turn starts one of the two on a free port, warms it up with a
request a client, and asks it with `pegainfer bench serve`: token ids drawn from the round's seed, equal for
both, greedy, answers of full length, streamed. The peer gets a slot for each client, a context that holds
them all, continuous batching (its default) and the same number of threads; it keeps no states of finished
requests, for no prompt comes twice. Client and server share the cores, as both sides do alike.

Rows are appended to bench/results/llama-server.jsonl. Exits with 1 where a ratio is below the bar.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.resolve import resolve
from pegainfer.cli.machine import append_result, provenance

CLI = [sys.executable, "-m", "pegainfer.cli.main"]
BAR = 1.2  # of the peer's tokens a second
VOCABULARY = 49_000  # ids below it are in the default model's vocabulary
START_SECONDS = 120.0
POLL_SECONDS = 0.05
KEYS = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_itl_ms")


@dataclass(frozen=True)
class Load:
    """What both servers are asked."""

    clients: int
    requests: int
    prompt: int  # tokens of each
    output: int
    seed: int


def peer_command(binary: str, model: Path, load: Load, threads: int) -> list[str]:
    room = load.clients * (load.prompt + load.output + 64)
    numbers = {"-t": threads, "-tb": threads, "-np": load.clients, "-c": room, "--cache-ram": 0}
    return [binary, "-m", str(model), *(str(x) for pair in numbers.items() for x in pair)]


def our_command(model: Path, threads: int) -> list[str]:
    return [*CLI, "serve", str(model), "--threads", str(threads)]


@contextlib.contextmanager
def served(command: list[str]) -> Iterator[int]:
    """The port of a server that answers /health with 200; it is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=said, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + START_SECONDS
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    raise SystemExit(f"{command[0]} does not serve:\n{said.read()[-3000:].decode()}")
                time.sleep(POLL_SECONDS)
            yield port
        finally:
            process.terminate()
            process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def measure(port: int, load: Load) -> dict[str, Any]:
    """The client's result, of answers that all have their full length."""
    flags = {
        "port": port,
        "num-prompts": load.requests,
        "max-concurrency": load.clients,
        "num-warmups": load.clients,
        "random-input-len": load.prompt,
        "random-output-len": load.output,
        "vocab-size": VOCABULARY,
        "seed": load.seed,
        "temperature": 0,
        "result-filename": "r.json",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [*CLI, "bench", "serve", "--ignore-eos", "--save-result", "--result-dir", folder]
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        result: dict[str, Any] = json.loads((Path(folder) / "r.json").read_text())
    wanted = load.requests * load.output
    if result["failed"] or result["total_output_tokens"] != wanted:
        told = f"{result['total_output_tokens']} of {wanted} tokens, {result['failures']}"
        raise SystemExit(f"the server on port {port} did not answer in full: {told}")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL.name, help="a GGUF file, or a known name")
    parser.add_argument("--peer", required=True, help="llama.cpp's llama-server")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4, help="for each client")
    parser.add_argument("--prompt", type=int, default=96, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("bench/results/llama-server.jsonl"))
    args = parser.parse_args()
    model = resolve(args.model, fetch=True).path
    where = provenance(args.threads)
    print(f"{model.name}, {args.prompt} in, {args.output} out, {args.threads} threads, load "
          f"{os.getloadavg()[0]:.1f}; medians of {args.rounds} alternating rounds")  # fmt: skip
    print(f"{'clients':>7} {'server':12} {'tok/s':>7} {'TTFT ms':>8} {'TPOT ms':>8} {'ITL P99':>8}")
    reached = True
    for clients in args.clients:
        runs: dict[str, list[dict[str, Any]]] = {"llama-server": [], "pegainfer": []}
        for i in range(args.rounds):
            load = Load(clients, args.requests * clients, args.prompt, args.output, seed=1000 * clients + i)
            commands = {
                "llama-server": peer_command(args.peer, model, load, args.threads),
                "pegainfer": our_command(model, args.threads),
            }
            for name, command in commands.items():
                with served(command) as port:
                    runs[name].append(measure(port, load))
                row = {**where, "server": name, "clients": clients, "round": i}
                append_result(args.results, row | {key: runs[name][-1][key] for key in KEYS})
        medians = {n: {k: statistics.median(r[k] for r in of) for k in KEYS} for n, of in runs.items()}
        for name, found in medians.items():
            print(f"{clients:7} {name:12} " + " ".join(f"{found[k]:7.1f}" for k in KEYS), flush=True)
        ratio = medians["pegainfer"][KEYS[0]] / medians["llama-server"][KEYS[0]]
        reached &= ratio >= BAR
        print(
            f"{clients:7} ratio {ratio:.2f} ({'reached' if ratio >= BAR else 'SHORT of'} {BAR})", flush=True
        )
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
