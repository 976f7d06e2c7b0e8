"""Conversations in a KV cache that is far too small, with and without tiers: hits, first tokens, tokens.

    python bench/kv_tiers.py [MODEL] [--chats 100] [--turns 10] [--pool 96MiB] [--host 2GiB] [--disk 8GiB]

Each turn sends the whole conversation so far and some new tokens; the next chat is drawn at random, so that a
chat's blocks have left the KV cache when its next turn comes. The same turns run without tiers, with a host
tier, with host and disk, and with the disk alone in a new process's place, where nothing but the folder is
left of the run before. Prints, for each, the share of prompt tokens that was found, the tokens that each tier
gave, and percentiles of the time until the first token. Exits with 1 where a token differs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.config import EngineConfig
from pegainfer.app.options import parse_bytes
from pegainfer.app.resolve import resolve
from pegainfer.cli.spec import EngineSpec, build
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine


@dataclass
class Trace:
    """What one run of all turns gave."""

    name: str
    stats: EngineStats
    first_tokens: list[float] = field(default_factory=list)  # seconds, by turn
    answers: list[list[int]] = field(default_factory=list)

    def line(self) -> str:
        cuts = statistics.quantiles(self.first_tokens, n=100, method="inclusive")
        share = self.stats.prefix_hits / max(1, self.stats.prefix_queries)
        tiers = "".join(f" {tier.kind} {tier.hit_tokens:,}" for tier in self.stats.tiers)
        times = " ".join(f"{1e3 * cuts[p - 1]:9.1f}" for p in (50, 90, 99))
        return f"{self.name:16} {100 * share:6.1f}% {times}  {tiers}"


def turns(args: argparse.Namespace, vocab_size: int) -> list[tuple[int, list[int]]]:
    """(chat, new tokens) of each turn."""
    r = random.Random(args.seed)
    order = [chat for chat in range(args.chats) for _ in range(args.turns)]
    r.shuffle(order)
    return [(chat, r.choices(range(vocab_size), k=args.new)) for chat in order]


def run(name: str, args: argparse.Namespace, host: str, disk: str) -> Trace:
    """All turns, `--together` at a time."""
    engine = EngineConfig(
        max_model_len=args.turns * (args.new + args.answer) + 16, kv_cache_memory=parse_bytes(args.pool),
        threads=args.threads, backend=args.device, kv_offload=parse_bytes(host), kv_offload_disk=disk,
    )  # fmt: skip
    scheduler = SchedulerConfig(max_slots=args.together)
    path = resolve(args.model, fetch=True).path
    spec = EngineSpec(name="model", path=str(path), engine=engine, scheduler=scheduler)
    built = build(spec)
    running = InProcessEngine(built.runner, built.info, scheduler)
    trace = Trace(name, running.stats())
    history: dict[int, list[int]] = {}
    try:
        plan = turns(args, built.info.vocab_size)
        while plan:
            batch: dict[int, list[int]] = {}
            while plan and len(batch) < args.together and plan[0][0] not in batch:
                chat, new = plan.pop(0)
                batch[chat] = history.get(chat, []) + new
            answers, seconds = ask(running, list(batch.values()), args.answer, len(trace.answers))
            for (chat, prompt), answer in zip(batch.items(), answers, strict=True):
                history[chat] = prompt + answer
            trace.first_tokens += seconds
            trace.answers += answers
        trace.stats = running.stats()
    finally:
        running.close()
    return trace


def ask(
    engine: InProcessEngine, prompts: Sequence[list[int]], most: int, first: int
) -> tuple[list[list[int]], list[float]]:
    """Answers and seconds until their first tokens."""
    answers: list[list[int]] = [[] for _ in prompts]
    began, seconds = [0.0] * len(prompts), [0.0] * len(prompts)
    done = threading.Semaphore(0)

    def sink(event: TokenEvent) -> None:
        i = int(event.request_id) - first
        if event.error is not None:
            sys.exit(f"a request failed: {event.error}")
        if event.tokens and not answers[i]:
            seconds[i] = time.monotonic() - began[i]
        answers[i] += event.tokens
        if event.finish is not None:
            done.release()

    sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        began[i] = time.monotonic()
        request = GenerateRequest(id=str(first + i), prompt=pack_tokens(prompt), sampling=sampling)
        engine.submit(request, sink)
    for _ in prompts:
        done.acquire()
    return answers, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL.display_name)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or reference")
    parser.add_argument("--chats", type=int, default=100)
    parser.add_argument("--turns", type=int, default=10, help="of each chat")
    parser.add_argument("--new", type=int, default=48, help="tokens that each turn adds")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--together", type=int, default=4, help="requests at a time")
    parser.add_argument("--pool", default="96MiB", help="the KV cache")
    parser.add_argument("--host", default="2GiB", help="the host tier")
    parser.add_argument("--disk", default="8GiB", help="the disk tier")
    parser.add_argument("--folder", default=None, help="of the disk tier; default: a temporary one")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        disk = f"{args.folder or temporary}:{args.disk}"
        cases = [
            ("no tiers", "0", ""), ("host", args.host, ""), ("host and disk", args.host, disk),
            ("disk, restarted", "0", disk),
        ]  # fmt: skip
        print(f"{'':16} {'hit':>7} {'p50 ms':>9} {'p90 ms':>9} {'p99 ms':>9}   tokens from tiers")
        traces = []
        for name, host, folder in cases:
            traces.append(run(name, args, host, folder))
            print(traces[-1].line(), flush=True)
    if any(trace.answers != traces[0].answers for trace in traces):
        sys.exit("tokens differ")
    print(f"{len(traces[0].answers)} answers, equal in all runs")


if __name__ == "__main__":
    main()
