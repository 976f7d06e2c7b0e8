"""Steps that repeat the one before are drawn inside their graph: the tokens of steps that are told anew."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.contract.step import Runner
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.scheduler import Scheduler
from pegainfer.runtime.cuda.driver import probe
from tests.gpu.harness import sized
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3

MODEL = TinyQwen3(
    "gpu", seed=62, dtype="bf16",
    config={"head_dim": 128, "hidden_size": 256, "vocab_size": 1000, "max_position_embeddings": 1024},
)  # fmt: skip
CONFIG = SchedulerConfig(max_slots=24, prefix_cache=False, target_itl_ms=0.0)


@dataclass(frozen=True)
class Traffic:
    """Tokens of the longest prompt, of the shortest and of the longest answer; how many steps must repeat."""

    prompt: int
    answers: tuple[int, int]
    repeats: int


WHOLE = sized(Traffic(300, (20, 200), 15), Traffic(300, (30, 40), 15))
# Racecheck takes seconds a step, and tens of GB of the host's memory where steps are graphs.
LAUNCHES = sized(WHOLE, Traffic(40, (6, 9), 2))


def requests(count: int, traffic: Traffic) -> list[GenerateRequest]:
    """Prompts and answers of different lengths, half of them drawn: the batch shrinks again and again."""
    rng = np.random.default_rng(count)
    found = []
    for i in range(count):
        prompt = rng.integers(0, 1000, int(rng.integers(1, traffic.prompt))).tolist()
        drawn: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": i} if i % 2 else {}
        sampling = SamplingParams(
            max_tokens=int(rng.integers(*traffic.answers)), ignore_eos=True, **({"temperature": 0.0} | drawn)
        )
        found.append(GenerateRequest(id=str(i), prompt=pack_tokens(prompt), sampling=sampling))
    return found


def tokens_of(
    policy: Scheduler, runner: Runner, batch: list[GenerateRequest], repeat: bool
) -> tuple[dict[str, list[int]], int]:
    """Every answer, and how many plans repeated the one before. Two plans are in flight, without a clock."""
    for request in batch:
        policy.add(request, 0.0)
    flight: deque[Any] = deque()
    answers: dict[str, list[int]] = {r.id: [] for r in batch}
    repeats = 0
    while policy.has_work():
        plan, _ = policy.schedule(0.0)
        if plan is not None:
            repeats += plan.repeats
            told = plan if repeat else msgspec.structs.replace(plan, repeats=False)
            flight.append((plan, runner.sample(runner.forward(told))))
            continue
        oldest, pending = flight.popleft()
        for event in policy.commit(oldest, pending.wait(), 0.0):
            assert event.error is None
            answers[event.request_id] += event.tokens
    return answers, repeats


@pytest.mark.parametrize(
    ("count", "graph"),
    [(1, True), (3, True), (24, True), (3, False)],
    ids=["1 in graphs", "3 in graphs", "24 in graphs", "3 as launches"],
)
def test_a_repeated_step_draws_the_same_tokens(count: int, graph: bool, tmp_path: Path) -> None:
    if (reason := probe()) is not None:
        pytest.skip(reason)
    config = EngineConfig(backend="cuda", max_model_len=600, kv_cache_memory=64 << 20, cuda_graph=graph)
    traffic = WHOLE if graph else LAUNCHES
    runner = build_engine(write_checkpoint(MODEL, tmp_path), "gpu", config, CONFIG).runner
    try:
        batch = requests(count, traffic)
        policy = Scheduler(runner.info, CONFIG)
        (want, _), (got, repeats) = (tokens_of(policy, runner, batch, repeat) for repeat in (False, True))
    finally:
        runner.close()
    assert repeats > traffic.repeats
    assert [len(t) for t in got.values()] == [r.sampling.max_tokens for r in batch]
    assert got == want
