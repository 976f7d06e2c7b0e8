"""A prefill and a decode engine beside one engine: times until the first token and between tokens, tokens.

    python bench/prefill_decode.py [MODEL] [--requests 24] [--prompt 1024] [--answer 64] [--together 4]

Prompts of random tokens are sent so that `--together` requests are always under way. They run on one engine
with `--threads` threads, then on a decode engine with `--decode-threads` whose prompts are computed by a
prefill engine in another process with the rest, over TCP and over shared memory. Prints medians and 90th and
99th percentiles of the time until the first token and of the time between tokens. Exits with 1 where a token
differs, or a prompt was not computed by the peer.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pegainfer.app.assemble import Engine
from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.config import EngineConfig
from pegainfer.app.options import parse_bytes
from pegainfer.app.resolve import resolve
from pegainfer.cli.spec import EngineSpec, build
from pegainfer.contract.event import TokenEvent
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.peers.prefill import PrefillSide

START_SECONDS = 300.0
SCHEDULER = SchedulerConfig(peer_min_tokens=64)


@dataclass
class Run:
    """What one arrangement gave."""

    name: str
    answers: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)  # of each token, from the request on; seconds
    from_peers: int = 0  # prompt tokens

    def line(self) -> str:
        first = [times[0] for times in self.times.values()]
        between = [b - a for times in self.times.values() for a, b in itertools.pairwise(times)]
        figures = ""
        for values in (first, between):
            cuts = statistics.quantiles(values, n=100, method="inclusive")
            figures += "".join(f" {1e3 * cuts[p - 1]:8.1f}" for p in (50, 90, 99)) + "  "
        return f"{self.name:22}{figures} {self.from_peers:>9,}"


def engine_of(args: argparse.Namespace, threads: int, **config: Any) -> tuple[Engine, InProcessEngine]:
    """An engine in this process."""
    base = EngineConfig(
        max_model_len=args.prompt + args.answer + 1, kv_cache_memory=parse_bytes(args.pool),
        threads=threads, backend=args.device, peer_timeout=60.0,
    )  # fmt: skip
    path = resolve(args.model, fetch=True).path
    spec = EngineSpec(
        name="model", path=str(path), engine=replace(base, **config), scheduler=SCHEDULER
    )  # fmt: skip
    built = build(spec)
    return built, InProcessEngine(built.runner, built.info, SCHEDULER, peers=built.peers)


def serve_prefill(args: argparse.Namespace, threads: int, listen: str, pipe: Connection) -> None:
    """A prefill engine in a process of its own, until the other end of the pipe is closed."""
    built, engine = engine_of(
        args, threads, role="prefill", peer_listen=listen, kv_offload=parse_bytes(args.host)
    )
    assert isinstance(built.peers, PrefillSide)
    pipe.send(listen if listen.startswith("unix:") else f"127.0.0.1:{built.peers.port}")
    try:
        pipe.recv()
    except EOFError:
        engine.close()


def measure(name: str, engine: InProcessEngine, args: argparse.Namespace) -> Run:
    """Sends all requests, `--together` at a time, after one that warms up."""
    r = random.Random(args.seed)
    vocabulary = range(engine.info.vocab_size)
    prompts = [r.choices(vocabulary, k=args.prompt) for _ in range(args.requests + 1)]
    run = Run(name)
    began: dict[int, float] = {}
    room, done = threading.Semaphore(args.together), threading.Semaphore(0)
    sampling = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)

    def sink(event: TokenEvent) -> None:
        i, now = int(event.request_id), time.monotonic()
        if event.error is not None:
            print(f"a request failed: {event.error}", flush=True)
            os._exit(1)
        run.answers[i] += event.tokens
        run.times[i] += [now - began[i]] * len(event.tokens)
        if event.finish is not None:
            room.release()
            done.release()

    for i, prompt in enumerate(prompts):
        room.acquire()
        began[i], run.answers[i], run.times[i] = time.monotonic(), [], []
        engine.submit(GenerateRequest(id=str(i), prompt=pack_tokens(prompt), sampling=sampling), sink)
        if i == 0:
            done.acquire()
            del run.times[0]
    for _ in prompts[1:]:
        done.acquire()
    run.from_peers = sum(tier.hit_tokens for tier in engine.stats().tiers if tier.kind == "peer")
    return run


def with_peer(name: str, listen: str, args: argparse.Namespace) -> Run:
    """A decode engine here, a prefill engine in another process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    threads = max(1, args.threads - args.decode_threads)
    process = context.Process(target=serve_prefill, args=(args, threads, listen, there), daemon=True)
    process.start()
    there.close()
    if not here.poll(START_SECONDS):
        sys.exit("the prefill engine did not start")
    built, engine = engine_of(args, args.decode_threads, role="decode", prefill_peers=here.recv())
    try:
        while built.peers is not None and not built.peers.stats()[0].connected:
            time.sleep(0.01)
        return measure(name, engine, args)
    finally:
        engine.close()
        here.close()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL.display_name)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--together", type=int, default=4, help="requests at a time")
    parser.add_argument("--pool", default="512MiB", help="the KV cache of each engine")
    parser.add_argument("--host", default="1GiB", help="the prefill engine's host tier")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--decode-threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    _, alone = engine_of(args, args.threads)
    try:
        runs = [measure("one engine", alone, args)]
    finally:
        alone.close()
    with tempfile.TemporaryDirectory() as folder:
        runs.append(with_peer("prefill + decode, TCP", "127.0.0.1:0", args))
        runs.append(with_peer("prefill + decode, shm", f"unix:{Path(folder) / 'peer.sock'}", args))
    print(f"{'':22} {'first token, ms: p50, p90, p99':>27}   {'between tokens, ms':>26}   from peers")
    for run in runs:
        print(run.line())
    if any(run.answers != runs[0].answers for run in runs):
        sys.exit("tokens differ")
    expected = (args.requests + 1) * (args.prompt - 1) // 16 * 16
    if any(run.from_peers < 0.9 * expected for run in runs[1:]):
        sys.exit(f"the peers gave fewer than nine in ten of {expected:,} prompt tokens")
    print(f"{len(runs[0].answers)} answers, equal in all runs")


if __name__ == "__main__":
    main()
