"""A line with pages and states on NumPy's references, through the whole engine."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import BlockCopy, NewSlot, Row, Runner, SlotBlocks, StateSnapshot, StepPlan
from pegainfer.engine.config import SchedulerConfig
from tests.support.hybrid_traffic import check_coverage, memory_of, run
from tests.support.toyhybrid.checkpoint import register, write_toy

STEPS = int(os.environ.get("PEGAINFER_HYBRID_STEPS", "250"))
GREEDY = SamplingParams(temperature=0.0, logprobs=1)


def test_random_traffic_gives_the_tokens_of_each_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    folder = write_toy(tmp_path)
    check_coverage(run(folder, STEPS, backend="reference", **memory_of(folder)))


class Driver:
    """Runs plans one by one. Slot s has the blocks 10 s to 10 s + 9 and the state s; others are free."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.step = runner, 0

    def enter(self, slot: int, tokens: list[int], *rows: Row, **parts: object) -> tuple[int, ...]:
        new = NewSlot(
            slot=slot, seq=slot, tokens=pack_tokens(tokens), num_prompt=len(tokens), sampling=GREEDY, seed=1
        )
        blocks = (SlotBlocks(slot, 0, tuple(range(10 * slot, 10 * slot + 10))), SlotBlocks(slot, 1, (slot,)))
        return self.run(*rows, news=(new,), blocks=blocks, **parts)

    def run(self, *rows: Row, **parts: object) -> tuple[int, ...]:
        self.step += 1
        plan = StepPlan(step=self.step, rows=rows, **parts)  # type: ignore[arg-type]
        return sum(self.runner.sample(self.runner.forward(plan)).wait().tokens, ())


def test_snapshots_lie_anywhere_in_a_row_and_are_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in one prefill, one while decoding; each is restored by a copy ahead of a new sequence's row."""
    register(monkeypatch)
    config = EngineConfig(backend="reference", max_model_len=160, kv_cache_memory=1 << 22)
    engine = build_engine(write_toy(tmp_path), "toy", config, SchedulerConfig(max_slots=4))
    prompt = np.random.default_rng(3).integers(0, 500, 62).tolist()
    driver = Driver(engine.runner)
    snapshots = (StateSnapshot(0, 1, 16, 10), StateSnapshot(0, 1, 48, 11))
    text = [*prompt, *driver.enter(0, prompt, Row(0, 0, 62, True), snapshots=snapshots)]
    for i in range(30):
        at = 62 + i
        saved = (StateSnapshot(0, 1, 64, 12),) if at == 63 else ()
        text += driver.run(Row(0, at, 1, True), snapshots=saved)
    for slot, (position, state) in enumerate(((16, 10), (48, 11), (64, 12)), 1):
        shared = tuple(BlockCopy(0, i, 10 * slot + i) for i in range(position // 16))
        copies = (BlockCopy(1, state, slot), *shared)
        known = text[: position + 1]
        row = Row(slot, position, 1, True)
        drawn = driver.enter(slot, known, row, copies=copies)
        while len(known) < 62:  # the prompt goes on as it was given
            driver.run(frees=(slot,))
            known = text[: len(known) + 5]
            drawn = driver.enter(slot, known, Row(slot, position, len(known) - position, True), copies=copies)
        for at in range(len(known), 90):
            assert drawn == (text[at],), f"token {at} after the snapshot at {position}"
            drawn = driver.run(Row(slot, at, 1, True))
    engine.runner.close()
