"""Requests for many LoRA adapters, Zipf distributed, on an engine with few slots: throughput, loads, waits.

python bench/lora_traffic.py                                  the null device, with steps of some milliseconds
python bench/lora_traffic.py --model MODEL --folder ADAPTERS  the CPU; every folder in ADAPTERS is an adapter

Each of `--clients` sends its next request when the one before has ended. The same requests to the base model
alone are the first line. Ends with status 1 if a request failed or got no end.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pegainfer.app.assemble import build_engine, engine_info
from pegainfer.app.config import EngineConfig
from pegainfer.app.lora import wait
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.null.config import NullConfig
from pegainfer.null.runner import NullRunner

PATIENCE = 120.0  # seconds without an event after which a request counts as lost
VOCABULARY = 100  # token ids of prompts


@dataclass
class Traffic:
    """What became of the requests: times in seconds."""

    seconds: float = 0.0
    tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between two events of a request
    failures: list[str] = field(default_factory=list)

    def line(self, label: str, loads: int) -> str:
        first, gaps = (np.percentile(v or [0.0], (50, 99)) for v in (self.first_tokens, self.gaps))
        return (
            f"{label:10} {len(self.first_tokens) / self.seconds:9.1f} requests/s "
            f"{self.tokens / self.seconds:9.0f} tokens/s  first token p50 {1e3 * first[0]:.1f} "
            f"p99 {1e3 * first[1]:.1f} ms  gap p99 {1e3 * gaps[1]:.1f} "
            f"max {1e3 * max(self.gaps, default=0.0):.1f} ms  loads {loads}  lost {len(self.failures)}"
        )


def ask(engine: InProcessEngine, request: GenerateRequest, traffic: Traffic, lock: threading.Lock) -> None:
    """Sends one request and waits for its end."""
    times: list[float] = []
    ended = threading.Event()
    last: list[TokenEvent] = []
    tokens = 0

    def sink(event: TokenEvent) -> None:
        nonlocal tokens
        times.append(time.monotonic())
        tokens += len(event.tokens)
        if event.finish is not None:
            last.append(event)
            ended.set()

    began = time.monotonic()
    engine.submit(request, sink)
    well = ended.wait(PATIENCE) and last[0].finish is not FinishReason.ERROR
    with lock:
        if not well:
            traffic.failures.append(f"{request.id}: {last[0].error if last else 'no end'}")
            return
        traffic.tokens += tokens
        traffic.first_tokens.append(times[0] - began)
        traffic.gaps += [b - a for a, b in itertools.pairwise(times)]


def run(engine: InProcessEngine, names: list[str | None], args: argparse.Namespace) -> Traffic:
    """One request for each name, from `--clients` at once."""
    rng = random.Random(args.seed)
    requests = [
        GenerateRequest(
            id=f"r{i}",
            prompt=pack_tokens([rng.randrange(VOCABULARY) for _ in range(args.prompt)]),
            sampling=SamplingParams(max_tokens=args.max_tokens, ignore_eos=True, temperature=0.0),
            adapter=name,
        )
        for i, name in enumerate(names)
    ]
    traffic, lock = Traffic(), threading.Lock()
    began = time.monotonic()
    with ThreadPoolExecutor(args.clients) as clients:
        for done in [clients.submit(ask, engine, request, traffic, lock) for request in requests]:
            done.result()
    traffic.seconds = time.monotonic() - began
    return traffic


def null_engine(args: argparse.Namespace, folder: Path) -> tuple[InProcessEngine, list[Path]]:
    """The null device and files that it takes for adapters."""
    files = [folder / f"a{i}" for i in range(args.adapters)]
    for file in files:
        file.write_text(f"adapter {file.name}")
    runner = NullRunner(
        NullConfig(max_adapters=args.slots, max_host_adapters=args.host, max_slots=args.clients,
                   step_seconds=args.step_ms / 1e3)
    )  # fmt: skip
    info = engine_info(runner.info, "null", "NullModel", "null", 0)
    return InProcessEngine(runner, info), files


def cpu_engine(args: argparse.Namespace) -> tuple[InProcessEngine, list[Path]]:
    folders = sorted(p for p in Path(args.folder).iterdir() if p.is_dir())[: args.adapters]
    config = EngineConfig(
        enable_lora=True, max_loras=args.slots, max_cpu_loras=args.host, max_lora_rank=args.rank,
        max_model_len=args.prompt + args.max_tokens, kv_cache_memory=1 << 28,
    )  # fmt: skip
    scheduler = SchedulerConfig(max_slots=args.clients)
    engine = build_engine(Path(args.model), "model", config, scheduler)
    return InProcessEngine(engine.runner, engine.info, scheduler), folders


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="of the CPU; otherwise the null device")
    parser.add_argument("--folder", help="of the model's adapters")
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--host", type=int, default=32, help="adapters in the host's memory")
    parser.add_argument("--rank", type=int, default=16, help="the adapters' greatest rank")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--zipf", type=float, default=1.0, help="exponent: the i-th adapter has a weight i^-x"
    )
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the null device")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        engine, paths = cpu_engine(args) if args.model else null_engine(args, Path(made))
        for path in paths:
            wait(lambda done, path=path: engine.load_adapter(path.name, str(path), done))  # type: ignore[misc]
        weights = [(i + 1) ** -args.zipf for i in range(len(paths))]
        drawn = random.Random(args.seed).choices([p.name for p in paths], weights, k=args.requests)
        base = run(engine, [None] * args.requests, args)
        print(base.line("base", 0))
        before = engine.stats().adapter_loads
        mixed = run(engine, [*drawn], args)
        print(mixed.line("adapters", engine.stats().adapter_loads - before))
        for failure in (*base.failures, *mixed.failures):
            print(failure)
        engine.close()
    raise SystemExit(bool(base.failures or mixed.failures))


if __name__ == "__main__":
    main()
