"""Many requests into a KV pool that is far too small: do all finish, with which tokens, how late?

    python bench/kv_pressure.py [MODEL] [--requests 200] [--tokens 2000] [--pool 10000] [--cpu-clock]

Runs the requests once with as many at a time as the pool holds and no pressure, then with 64 slots in the
small pool. Prints preemptions, both times, and the longest wait in fair shares. A wait is the time from the
submit to the last token less the request's own time, which is what it took from its first step on where
nothing was pressed. The fair share of request k of n is k / n of the unpressured run, and that of the pool's
first fill for those in it. With --cpu-clock all of it is in CPU seconds of this process, which computes all
the time: then others who use the machine meanwhile hardly change a ratio.
Exits with 1 where tokens differ or a wait is longer than three shares.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.config import EngineConfig
from pegainfer.app.resolve import resolve
from pegainfer.cli.spec import EngineSpec, build
from pegainfer.contract.event import TokenEvent
from pegainfer.contract.handle import EventSink
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.engine.pipeline import Clock

BLOCK = 16
MOST_SHARES = 3.0


class _Answer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end = self.own = 0.0  # seconds: its last token after the first submit; and after its first step
        self.error: str | None = None


def run(model: str, args: argparse.Namespace, pool: int, slots: int) -> tuple[list[_Answer], int]:
    """The answers, in the order of their requests, and the preemptions."""
    path = resolve(model, fetch=True).path
    engine = EngineConfig(max_model_len=args.tokens + BLOCK, kv_cache_memory=pool, threads=args.threads)
    spec = EngineSpec(name="model", path=str(path), engine=engine, scheduler=SchedulerConfig(max_slots=slots))
    built = build(spec)
    clock = time.process_time if args.cpu_clock else time.monotonic
    running = InProcessEngine(built.runner, built.info, spec.scheduler, clock=clock)
    r = random.Random(args.seed)
    answers = [_Answer() for _ in range(args.requests)]
    left = threading.Semaphore(0)
    try:
        begin = clock()
        for i, answer in enumerate(answers):
            count = r.choice([args.tokens // 40, args.tokens // 4])
            prompt = r.choices(range(built.info.vocab_size), k=args.tokens - count)
            sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            request = GenerateRequest(id=f"r{i}", prompt=pack_tokens(prompt), sampling=sampling)
            running.submit(request, _sink(answer, left, clock, begin))
        for _ in answers:
            left.acquire()
        return answers, running.stats().preemptions
    finally:
        running.close()


def _sink(answer: _Answer, left: threading.Semaphore, clock: Clock, begin: float) -> EventSink:
    def sink(event: TokenEvent) -> None:
        answer.tokens += event.tokens
        if event.finish is not None:
            answer.end = clock() - begin
            answer.error = event.error
            if event.timings is not None:
                answer.own = event.timings.finished - event.timings.scheduled
            left.release()

    return sink


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL.name)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2000, help="of a request, prompt and answer")
    parser.add_argument("--pool", type=int, default=10_000, help="tokens that the small pool holds")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--cpu-clock", action="store_true", help="count this process's CPU seconds")
    args = parser.parse_args()
    token_bytes = block_bytes(args.model) // BLOCK
    together = args.pool // args.tokens
    calm, none = run(args.model, args, (together + 1) * (args.tokens + BLOCK) * token_bytes, together)
    total = max(a.end for a in calm)
    pressed, preemptions = run(args.model, args, args.pool * token_bytes, 64)
    shares = [total * max(k + 1, together) / args.requests for k in range(args.requests)]
    waits = [(p.end - c.own) / share for p, c, share in zip(pressed, calm, shares, strict=True)]
    ends = [p.end / share for p, share in zip(pressed, shares, strict=True)]
    same = sum(a.tokens == b.tokens for a, b in zip(calm, pressed, strict=True))
    print(
        f"unpressured {total:.1f} s ({none} preemptions), in the small pool "
        f"{max(a.end for a in pressed):.1f} s ({preemptions} preemptions)"
    )
    worst = max(range(args.requests), key=waits.__getitem__)
    print(
        f"same tokens {same} of {args.requests}; longest wait {waits[worst]:.2f} fair shares "
        f"(request {worst}); own times included {max(ends):.2f}"
    )
    failed = [a.error for a in (*calm, *pressed) if a.error]
    for error in failed[:3]:
        print(f"failed: {error}")
    return 0 if same == args.requests and max(waits) <= MOST_SHARES and not failed else 1


def block_bytes(model: str) -> int:
    """Of one block in all groups of the model."""
    from pegainfer.app.bounds import model_groups
    from pegainfer.app.load import open_model
    from pegainfer.kv.device.layout import block_bytes

    with open_model(resolve(model, fetch=True).path) as (found, _):
        return sum(map(block_bytes, model_groups(found, EngineConfig())))


if __name__ == "__main__":
    sys.exit(main())
