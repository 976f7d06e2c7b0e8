"""Throughput without a server: single prefills, plain decoding, and a mix of 256 sequences in one process.

    python bench/offline.py FOLDER [--device cuda] [--dummy] [--only mix] [--max-prefill-tokens 8192]
        [--quantization fp8] [--kv-cache-dtype fp8]

The peer's run of the same is `vllm_offline_bench.py` of its pack: the same seeded prompts and lengths in the
same order (the mix: 100 to 1,024 tokens in and out, temperature 0.6), no prefix cache,
no end-of-text token, wall time from the first request handed over to the last token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import KV_DTYPES, EngineConfig
from pegainfer.cli.machine import append_result, num_cores, provenance
from pegainfer.contract.errors import EngineDeadError
from pegainfer.contract.event import TokenEvent
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine

MAX_MODEL_LEN, SLOTS, SEED = 20_000, 256, 5
PREFILLS = (1024, 16_000)
BATCHES = (1, 8, 16, 32, 64, 128)
MIX = 256  # sequences
Prompt = list[int]


class Offline:
    """Hands requests to an engine in this process and waits for their ends."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine
        self._sent = 0

    def seconds(self, prompts: list[Prompt], sampling: list[SamplingParams]) -> float:
        """Wall time of these requests together. Raises EngineDeadError where one fails."""
        done = threading.Semaphore(0)
        counts = [0] * len(prompts)
        errors: list[str] = []
        requests = [
            GenerateRequest(id=f"offline-{self._sent + i}", prompt=pack_tokens(p), sampling=s)
            for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))
        ]
        self._sent += len(requests)
        began = time.perf_counter()
        for i, request in enumerate(requests):
            self._engine.submit(request, _counter(counts, errors, i, done))
        for _ in requests:
            done.acquire()
        took = time.perf_counter() - began
        wanted = [s.max_tokens for s in sampling]
        if errors or counts != wanted:
            raise EngineDeadError("offline requests failed", expected=sum(filter(None, wanted)), got=errors)
        return took


def _counter(
    counts: list[int], errors: list[str], place: int, done: threading.Semaphore
) -> Callable[[TokenEvent], None]:
    def sink(event: TokenEvent) -> None:
        counts[place] += len(event.tokens)
        if event.error is not None:
            errors.append(str(event.error))
        if event.finish is not None:
            done.release()

    return sink


class Workload:
    """The peer's requests. One generator draws everything: skipped parts are drawn all the same."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)

    def prompts(self, count: int, length: int) -> list[Prompt]:
        return [[self._random.randrange(100_000) for _ in range(length)] for _ in range(count)]

    def mix(self) -> tuple[list[Prompt], list[SamplingParams]]:
        prompts = [
            [self._random.randrange(10_000) for _ in range(self._random.randint(100, 1024))]
            for _ in range(MIX)
        ]
        answers = [self._random.randint(100, 1024) for _ in range(MIX)]
        return prompts, [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in answers]


def greedy(tokens: int, count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)] * count


def measure(offline: Offline, wanted: set[str], rounds: int) -> list[dict[str, Any]]:
    """One row a case. `rounds`: of the mix."""
    work = Workload()
    rows: list[dict[str, Any]] = []
    offline.seconds(work.prompts(1, 64), greedy(8, 1))
    for length in PREFILLS:
        drawn = [work.prompts(1, length) for _ in range(4)]
        if "prefill" in wanted:
            times = [1e3 * offline.seconds(p, greedy(1, 1)) for p in drawn]
            # The second best of four, as the peer's script has it.
            rows.append({"case": "prefill", "tokens": length, "ms": sorted(times)[1], "runs": times})
    for batch in BATCHES:
        first, whole = ([work.prompts(batch, 256) for _ in range(2)] for _ in range(2))
        if "decode" in wanted:
            short = min(offline.seconds(p, greedy(1, batch)) for p in first)
            long = min(offline.seconds(p, greedy(129, batch)) for p in whole)
            row = {"case": "decode", "batch": batch, "context": 256, "tokens": 128}
            rows.append(row | {"ms_step": 1e3 * (long - short) / 128})
    if "mix" in wanted:
        prompts, sampling = work.mix()
        total = sum(s.max_tokens or 0 for s in sampling)
        rates = [total / offline.seconds(prompts, sampling) for _ in range(rounds)]
        row = {"case": "mix", "sequences": MIX, "tokens": total, "tok_s": statistics.median(rates)}
        rows.append(row | {"runs": rates})
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folder", type=Path)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    p.add_argument("--dummy", action="store_true", help="seeded weights made on the GPU")
    p.add_argument(
        "--only", choices=("prefill", "decode", "mix"), nargs="+", default=["prefill", "decode", "mix"]
    )
    p.add_argument("--rounds", type=int, default=3, help="of the mix")
    p.add_argument("--max-prefill-tokens", type=int, default=8192)
    p.add_argument("--quantization")
    p.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPES)
    p.add_argument("--output", type=Path, default=Path("bench/results/offline.jsonl"))
    a = p.parse_args()
    config = EngineConfig(
        backend=a.device, load_format="dummy" if a.dummy else "auto", max_model_len=MAX_MODEL_LEN,
        quantization=a.quantization, kv_dtype=a.kv_cache_dtype,
    )  # fmt: skip
    scheduler = SchedulerConfig(
        max_slots=SLOTS, prefix_cache=False, max_prefill_tokens=a.max_prefill_tokens, target_itl_ms=0
    )
    where = provenance(num_cores())
    if a.device == "cuda":
        from pegainfer.app.gpu import read_bandwidth

        where["read_gb_s"] = round(read_bandwidth(config), 1)
    built = build_engine(a.folder, a.folder.name, config, scheduler)
    engine = InProcessEngine(built.runner, built.info, scheduler)
    try:
        rows = measure(Offline(engine), set(a.only), a.rounds)
        stats = engine.stats()
    finally:
        engine.close()
    print(f"{built.info.model} on {built.info.device}; reads {where['read_gb_s']} GB/s")
    for row in rows:
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "runs"}
        print(*(f"{k} {v}" for k, v in shown.items()))
        head = {**where, "bench": "offline", "model": built.info.model, "device": built.info.device}
        head |= {"quantization": a.quantization, "kv": config.kv_format}
        append_result(a.output, {**head, "max_prefill_tokens": a.max_prefill_tokens, **row})
    steps = {kind: f"{n} in {stats.kind_seconds[kind]:.2f} s" for kind, n in stats.kind_steps.items()}
    host = {stage: round(1e6 * s / max(1, stats.steps)) for stage, s in stats.host_seconds.items()}
    print(f"steps: {steps}; preemptions {stats.preemptions}; host µs a step: {host}")


if __name__ == "__main__":
    main()
