"""A step takes no memory that it does not give back: everything large was reserved at the start."""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, SlotBlocks, StepPlan
from pegainfer.engine.config import SchedulerConfig
from tests.support.tinymodel import Tiny, token_ids, write_checkpoint

SLOTS, PROMPT, VOCAB = 8, 16, 16384
WARM, MEASURED = 800, 400  # caches of the interpreter and of NumPy fill for some hundred steps
MODEL = Tiny("long", seed=1, config={"max_position_embeddings": 2048, "vocab_size": VOCAB})


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Runs a decode step of eight sequences with penalties and top_p."""
    config = EngineConfig(kv_cache_memory=1 << 26)
    engine = build_engine(write_checkpoint(MODEL, tmp_path), "tiny", config, SchedulerConfig(max_slots=SLOTS))
    runner, steps, positions = engine.runner, itertools.count(1), itertools.count(PROMPT)
    params = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.1)
    prompt = pack_tokens(token_ids(MODEL)[:PROMPT])

    def run(plan: StepPlan) -> None:
        assert runner.sample(runner.forward(plan)).wait().errors == {}

    def decode() -> None:
        at = next(positions)
        run(StepPlan(step=next(steps), rows=tuple(Row(s, at, 1, True) for s in range(SLOTS))))

    news = tuple(
        NewSlot(slot=s, seq=s, tokens=prompt, num_prompt=PROMPT, sampling=params, seed=s)
        for s in range(SLOTS)
    )
    blocks = tuple(SlotBlocks(s, 0, tuple(range(100 * s, 100 * s + 100))) for s in range(SLOTS))
    rows = tuple(Row(s, 0, PROMPT, True) for s in range(SLOTS))
    run(StepPlan(step=next(steps), news=news, blocks=blocks, rows=rows))
    yield decode
    runner.close()


def test_nothing_stays(step: Callable[[], None]) -> None:
    for _ in range(WARM):
        step()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(MEASURED):
        step()
    gc.collect()
    assert sys.getallocatedblocks() - before < MEASURED  # less than one object a step


def test_temporaries_are_small(step: Callable[[], None]) -> None:
    """Far below one row of logits a sequence: no activations pass through Python's heap."""
    for _ in range(50):
        step()
    tracemalloc.start()
    try:
        peaks = []
        for _ in range(50):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            step()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert statistics.median(peaks) < VOCAB * 4
