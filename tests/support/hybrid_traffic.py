"""Random traffic on a model with pages and states, compared with each request alone and nothing cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pegainfer.app.assemble import build_engine
from pegainfer.app.bounds import model_groups
from pegainfer.app.config import EngineConfig
from pegainfer.app.load import open_model
from pegainfer.app.memory import sequence_bytes, state_bytes
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens, unpack_tokens
from pegainfer.contract.step import PendingStep, Runner, RunnerInfo, StateGroup, StepPlan
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from tests.support.answers import Answer, answer, compare

BATCH = 24  # requests that are in the engine together
LENGTH = 400  # tokens of a sequence
CHUNK = 90  # prompt tokens of a step


class CountingRunner:
    """Counts what plans ask of a runner. Implements contract.step.Runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.counts: Counter[str] = Counter()
        groups = runner.info.kv.groups
        self._state_groups = [g for g, group in enumerate(groups) if isinstance(group, StateGroup)]
        self._block = next(g.block_size for g in groups if not isinstance(g, StateGroup))
        self._held: dict[tuple[int, int], int] = {}  # (slot, group) -> its state

    @property
    def info(self) -> RunnerInfo:
        return self.runner.info

    def forward(self, plan: StepPlan) -> Any:
        self._count(plan)
        return self.runner.forward(plan)

    def sample(self, handle: Any, masks: dict[int, bytes] | None = None) -> PendingStep:
        return self.runner.sample(handle, masks)

    def close(self) -> None:
        self.runner.close()

    def _count(self, plan: StepPlan) -> None:
        c = self.counts
        c["steps"] += 1
        c["rows"] += len(plan.rows)
        c["following rows"] += sum(r.follow for r in plan.rows)
        c["chunks"] += sum(r.count > 1 and not r.sample for r in plan.rows)
        c["repeated steps"] += plan.repeats
        self._held = {(s, g): state for (s, g), state in self._held.items() if s not in plan.frees}
        held = set(self._held.values())
        copied = {copy.dst: copy.src for copy in plan.copies if copy.group in self._state_groups}
        c["states forked"] += sum(src in held for src in copied.values())
        c["snapshots restored"] += sum(src not in held for src in copied.values())
        forked: set[int] = set()
        for change in plan.blocks:
            if change.group in self._state_groups:
                (state,) = change.blocks
                self._held[change.slot, change.group] = state
                if copied.get(state) in held:
                    forked.add(change.slot)
        entered = {new.slot for new in plan.news}
        rows = {row.slot: row for row in plan.rows}
        for slot in entered - forked:
            if slot in rows and rows[slot].start:
                c["page blocks hit"] += rows[slot].start // self._block
                c["state hits"] += 1
        for snapshot in plan.snapshots:
            row = rows[snapshot.slot]
            taken = snapshot.position > row.start  # others are named again until a commit has passed them
            c["snapshots"] += taken
            c["snapshots inside a row"] += taken and snapshot.position < row.start + row.count
            c["snapshots while decoding"] += taken and row.count == 1


def requests(
    rng: np.random.Generator, first: int, vocabulary: int, past: list[list[int]], drawn: bool
) -> list[GenerateRequest]:
    """Prompts of 1 to 300 tokens: new ones, such with a common beginning, and continuations of `past`.

    Args:
        drawn: whether some are sampled; otherwise the best token is always taken.
    """
    common = rng.integers(0, vocabulary, 200)
    found = []
    for i in range(BATCH):
        length = int(rng.integers(1, 260))
        tokens = rng.integers(0, vocabulary, length).tolist()
        kind = rng.random()
        if kind < 0.4:
            shared = int(rng.integers(0, min(length, 200)))
            tokens[:shared] = common[:shared].tolist()
        elif kind < 0.7 and past:
            before = past[int(rng.integers(len(past)))]
            tokens = (before + tokens[:40])[:300]
        sampling = SamplingParams(
            temperature=0.8 if drawn and rng.random() < 0.5 else 0.0, top_k=50,
            max_tokens=int(rng.integers(1, 60)), ignore_eos=True, logprobs=5, seed=first + i,
        )  # fmt: skip
        found.append(
            GenerateRequest(
                id=f"r{first + i}", prompt=pack_tokens(tokens), sampling=sampling,
                n=int(rng.choice([1, 1, 1, 2, 3])),
            )
        )  # fmt: skip
    return found


def run(
    folder: Path,
    steps: int,
    *,
    tie: float | None = None,
    alone: Mapping[str, Any] = MappingProxyType({}),
    **engine: Any,
) -> dict[str, Any]:
    """Until the engine has made so many steps, in whole batches of requests; returns what was counted.

    A second engine then runs the same requests, one sequence at a time, with no prefix cache, no chunks and
    one plan in flight.

    Args:
        tie: largest gap of logits, in nat, at which tokens may part; None: they never may.
        alone: fields of EngineConfig in which the second engine differs.
        engine: fields of EngineConfig.
    """
    config = EngineConfig(max_model_len=LENGTH, **engine)
    # Without a latency target, whose chunks depend on the clock.
    scheduler = SchedulerConfig(max_slots=8, max_prefill_tokens=CHUNK, target_itl_ms=0.0)
    built = build_engine(folder, "busy", config, scheduler)
    counting = CountingRunner(built.runner)
    busy = InProcessEngine(counting, built.info, scheduler)
    try:
        done = _traffic(busy, steps, drawn=tie is None)
        stats = busy.stats()
    finally:
        busy.close()
    one_by_one = SchedulerConfig(
        max_slots=1, max_prefill_tokens=LENGTH, prefix_cache=False, pipeline_depth=1, target_itl_ms=0.0
    )
    quiet_config = replace(config, kv_cache_memory=1 << 26, **alone)
    built = build_engine(folder, "alone", quiet_config, one_by_one)
    quiet = InProcessEngine(built.runner, built.info, one_by_one)
    ties: list[float] = []
    differences: list[str] = []
    try:
        for request, got in done:
            want = answer(quiet, [request], {})[request.id]
            try:
                ties += compare(got, want, tie)
            except AssertionError as error:
                differences.append(f"{request.id}: {error}")
    finally:
        quiet.close()
    seen = dict(counting.counts) | {
        "requests": len(done), "answers": sum(request.n for request, _ in done),
        "preemptions": stats.preemptions, "prefix tokens hit": stats.prefix_hits,
        **{f"{t.kind} tier: tokens loaded": t.hit_tokens for t in stats.tiers},
        **{f"{t.kind} tier: bytes saved": t.saved_bytes for t in stats.tiers},
        **{f"{t.kind} tier: failures": t.failures for t in stats.tiers},
        "answers that part at a tie": len(ties), "largest gap": round(max(ties, default=0.0), 4),
        "differences": len(differences),
    }  # fmt: skip
    print("\n".join([*(f"{name:28} {value:>10}" for name, value in seen.items()), *differences[:5]]))
    return seen


def _traffic(engine: InProcessEngine, steps: int, *, drawn: bool) -> list[tuple[GenerateRequest, Answer]]:
    """Batches of requests, some of which are cancelled, until the engine has made so many steps."""
    rng = np.random.default_rng(17)
    done: list[tuple[GenerateRequest, Answer]] = []
    past: list[list[int]] = []
    while engine.stats().steps < steps:
        batch = requests(rng, len(done), engine.info.vocab_size, past[-BATCH:], drawn)
        cancelled = {r.id: int(rng.integers(1, 8)) for r in batch if rng.random() < 0.1}
        answers = answer(engine, batch, cancelled)
        done += [(r, answers[r.id]) for r in batch]
        past += [unpack_tokens(r.prompt) + answers[r.id].tokens.get(0, []) for r in batch]
    return done


def check_coverage(seen: dict[str, Any], most_different: float = 0.0) -> None:
    """Everything that the traffic is there for has happened, and no more answers differ than that share."""
    assert seen["differences"] <= most_different * seen["answers"]
    for name in (
        "page blocks hit", "state hits", "snapshots restored", "states forked", "preemptions", "chunks",
        "following rows", "repeated steps", "snapshots",
    ):  # fmt: skip
        assert seen[name] > 0, f"no {name}"


def memory_of(folder: Path, **engine: Any) -> dict[str, Any]:
    """Fields of EngineConfig for a cache in which 8 sequences displace each other.

    It holds 8 states, 24 snapshots and pages for two and a half sequences.
    """
    config = EngineConfig(max_model_len=LENGTH, **engine)
    with open_model(folder) as (model, _):
        groups = model_groups(model, config)
    states = state_bytes(groups)
    pages = (sequence_bytes(groups, LENGTH) - states) * 5 // 2
    snapshots = 24 * states
    return {
        "kv_cache_memory": 8 * states + snapshots + pages + states // 2,
        "snapshot_share": (snapshots + states // 2) / (snapshots + pages + states // 2),
    }
