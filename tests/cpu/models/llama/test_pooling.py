"""Vectors of prompts on every backend: what they are made of, and that no cutting changes a bit of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, SlotBlocks
from pegainfer.engine.config import SchedulerConfig
from tests.support.pooled import PooledPrompts, vector
from tests.support.tinymodel import MODELS, token_ids, write_checkpoint
from tests.support.tinyrun import BACKENDS

MODEL = MODELS["tied_f32"]
IDS = token_ids(MODEL)[:40]


@pytest.fixture(params=BACKENDS, ids=lambda v: v[1] or "numpy")
def slots(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PooledPrompts]:
    backend, isa = request.param
    path = write_checkpoint(MODEL, tmp_path / "model")
    config = EngineConfig(backend=backend, isa=isa, activation="f32", kv_dtype="f32", kv_cache_memory=1 << 22)
    # Fewer slots than tokens of a step, so that a row's hidden states come in several parts.
    runner = build_engine(path, "m", config, SchedulerConfig(max_slots=3, max_prefill_tokens=48)).runner
    yield PooledPrompts(runner)
    runner.close()


def test_the_last_hidden_state_makes_the_logits(slots: PooledPrompts) -> None:
    result = slots.embed(IDS, "last", [len(IDS)], logprobs=20)
    table = MODEL.tensors()["model.embed_tokens.weight"].astype(np.float64)
    logits = table @ vector(result).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    best = dict(result.logprobs[0][0].top)
    assert len(best) == 20
    assert np.abs([logprobs[i] - p for i, p in best.items()]).max() < 1e-3


def test_the_mean_is_that_of_all_last_ones(slots: PooledPrompts) -> None:
    states = [vector(slots.embed(IDS[: n + 1], "last", [n + 1])) for n in range(len(IDS))]
    mean = vector(slots.embed(IDS, "mean", [len(IDS)]))
    assert np.array_equal(mean, np.mean(np.array(states, np.float64), axis=0).astype(np.float32))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunks_change_nothing(slots: PooledPrompts, pooling: str) -> None:
    whole = vector(slots.embed(IDS, pooling, [40]))
    assert whole.shape == (64,)
    for sizes in ([1, 39], [16, 16, 8], [3] * 13 + [1]):
        assert np.array_equal(vector(slots.embed(IDS, pooling, sizes)), whole)


def test_only_who_asks_is_pooled(slots: PooledPrompts) -> None:
    asks = SamplingParams(temperature=0.0, max_tokens=1, pooling="mean")
    news = tuple(
        NewSlot(slot=i, seq=i, tokens=pack_tokens(IDS[: 9 + i]), num_prompt=9 + i, sampling=s, seed=0)
        for i, s in enumerate((SamplingParams(temperature=0.0), asks, SamplingParams(temperature=0.0)))
    )
    blocks = tuple(SlotBlocks(i, 0, (4 + i,)) for i in range(3))
    together = slots.run(news=news, blocks=blocks, rows=tuple(Row(i, 0, 9 + i, True) for i in range(3)))
    assert list(together.pooled) == [1]
    slots.run(frees=(0, 1, 2))
    alone = slots.embed(IDS[:10], "mean", [10])
    assert together.pooled[1] == alone.pooled[0]
