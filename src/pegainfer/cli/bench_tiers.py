"""pegainfer bench tiers: the time until the first token by where the prompt's prefix lies."""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.spec import EngineSpec, build
from pegainfer.cli.target import MODEL_HELP, ModelFlags, choose
from pegainfer.contract.errors import ConfigError, EngineDeadError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.contract.event import TokenEvent
    from pegainfer.engine.inprocess import InProcessEngine

SEED = 20251129
SETTLE_SECONDS = 60.0  # most that copies to a tier are waited for
STATS_SECONDS = 1.0  # the engine's figures lag behind by this at most


@dataclass(frozen=True, kw_only=True)
class TierBenchFlags:
    """Raises ConfigError for sizes that cannot be measured."""

    tokens: tuple[int, ...] = field(
        default=(256, 1024), metadata={"help": "Prompt tokens; may be repeated.", "parse": "count"}
    )
    rounds: int = field(default=3, metadata={"help": "Each round runs every length once."})
    output: str = field(
        default="bench/results/tiers.jsonl", metadata={"help": "File to append JSON lines to."}
    )

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.tokens or min(self.tokens) < 32:
            raise ConfigError("sizes of a bench", expected="≥ 32 tokens, ≥ 1 round", got=self.tokens)


@dataclass
class Rung:
    """Seconds until the first token of prompts of one length, a value a round."""

    cold: list[float] = field(default_factory=list)
    hit: list[float] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    computed: int = 0  # rounds in which the tier's blocks were computed again instead


def tiers(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    bench: TierBenchFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    given: Given,
) -> int:
    """Measure the first token after a cold prompt, a hit in the KV cache, and a restore from each tier.

    Each tier is measured alone below the KV cache, which other prompts fill in between. A small
    --kv-cache-memory makes that quicker. A tier that is not given holds 1 GiB, the disk's in a temporary
    folder.
    """
    from pegainfer.cli.machine import append_result, num_cores, provenance

    with tempfile.TemporaryDirectory() as folder:
        host = engine.kv_offload or 1 << 30
        disk = engine.kv_offload_disk or f"{folder}:1GiB"
        found: dict[str, dict[int, Rung]] = {}
        for kind, offload in (("host", (host, "")), ("disk", (0, disk))):
            config = dataclasses.replace(engine, kv_offload=offload[0], kv_offload_disk=offload[1])
            target = choose(model, flags, config, scheduler, given, text=False)
            found[kind] = _ladder(target.spec, bench)
    where = provenance(engine.threads or num_cores())
    print(f"{'tokens':>8} {'cold':>9} {'hit':>9} {'host':>9} {'disk':>9}   (ms, medians of {bench.rounds})")
    for tokens in bench.tokens:
        rungs = {kind: found[kind][tokens] for kind in found}
        row = [rungs["host"].cold + rungs["disk"].cold, rungs["host"].hit + rungs["disk"].hit]
        row += [rung.restored for rung in rungs.values()]
        medians = [1e3 * statistics.median(values) for values in row]
        again = [f"{kind} computed {r.computed} times" for kind, r in rungs.items() if r.computed]
        print(f"{tokens:8} " + " ".join(f"{ms:9.1f}" for ms in medians), ", ".join(again))
        names = ("cold_ms", "hit_ms", "host_ms", "disk_ms")
        result: dict[str, Any] = dict(zip(names, (round(ms, 2) for ms in medians), strict=True))
        computed = {kind: rung.computed for kind, rung in rungs.items()}
        line = {**where, "bench": "tiers", "model": target.spec.name, "tokens": tokens, **result}
        append_result(Path(bench.output), {**line, "computed": computed})
    return 0


def _ladder(spec: EngineSpec, bench: TierBenchFlags) -> dict[int, Rung]:
    """Rungs by prompt length, with the one tier that the spec has."""
    from pegainfer.engine.inprocess import InProcessEngine

    built = build(spec)
    running = InProcessEngine(built.runner, built.info, spec.scheduler, peers=built.peers)
    try:
        most = built.info.max_model_len - 2
        if max(bench.tokens) > most:
            raise ConfigError("a prompt is too long", expected=f"≤ {most} tokens", got=max(bench.tokens))
        driver = _Driver(running)
        rungs = {tokens: Rung() for tokens in bench.tokens}
        for _ in range(bench.rounds + 1):  # the first warms up
            for tokens, rung in rungs.items():
                driver.climb(tokens, rung)
        for rung in rungs.values():
            for values in (rung.cold, rung.hit, rung.restored):
                del values[0]
        return rungs
    finally:
        running.close()


class _Driver:
    """Sends prompts one after the other."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine
        self._random = random.Random(SEED)
        self._sent = 0

    def climb(self, tokens: int, rung: Rung) -> None:
        """One fresh prompt: cold, again, and once more when other prompts have taken its place."""
        prompt = self._prompt(tokens)
        rung.cold.append(self._first_token(prompt))
        rung.hit.append(self._first_token(prompt))
        self._settle()
        info = self._engine.info
        filler = min(tokens, info.max_model_len - 2)
        for _ in range(info.num_blocks * info.block_size // filler + 1):
            self._first_token(self._prompt(filler))
        self._settle()
        before = self._hit_tokens()
        rung.restored.append(self._first_token(prompt))
        deadline = time.monotonic() + STATS_SECONDS
        while self._hit_tokens() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        rung.computed += self._hit_tokens() == before

    def _hit_tokens(self) -> int:
        """Prompt tokens that were loaded from the tier, as the engine's latest figures have it."""
        return self._engine.stats().tiers[0].hit_tokens

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._engine.info.vocab_size), k=tokens)

    def _settle(self) -> None:
        """Waits for the copies to the tier."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._engine.stats().tiers[0].in_flight and time.monotonic() < deadline:
            time.sleep(0.01)

    def _first_token(self, prompt: Sequence[int]) -> float:
        """Seconds until the first token of a prompt."""
        from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens

        ended: list[float] = []
        errors: list[str] = []
        done = threading.Event()

        def sink(event: TokenEvent) -> None:
            if event.error is not None:
                errors.append(event.error)
            if event.finish is not None:
                ended.append(time.perf_counter())
                done.set()

        self._sent += 1
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        request = GenerateRequest(id=f"bench-{self._sent}", prompt=pack_tokens(prompt), sampling=sampling)
        began = time.perf_counter()
        self._engine.submit(request, sink)
        done.wait()
        if errors:
            raise EngineDeadError(f"the bench's request failed: {errors[0]}")
        return ended[0] - began
