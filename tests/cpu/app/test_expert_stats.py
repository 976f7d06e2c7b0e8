"""Tokens of each expert, counted while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.experts import ExpertTokens
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from tests.support.answers import answer
from tests.support.tinymodel import Array, write_checkpoint
from tests.support.tinyqwen3_5moe import MODELS

PROMPTS = [np.random.RandomState(i).randint(0, 160, n).tolist() for i, n in enumerate((70, 3, 33))]
DECODED = 9  # tokens of each answer; the last one is never computed
CHOSEN = 3


def counts(experts: ExpertTokens) -> Array:
    found = np.frombuffer(experts.tokens, "<i8")
    return found.reshape(len(experts.layers), experts.num_experts)


def served(
    folder: Path, backend: str, *, prefill: int, expert_stats: bool = True, activation: str = "f32"
) -> ExpertTokens | None:
    """What was counted after the prompts were answered greedily, `prefill` prompt tokens a step."""
    config = EngineConfig(
        backend=backend, activation=activation, kv_cache_memory=1 << 22, expert_stats=expert_stats
    )
    scheduler = SchedulerConfig(max_slots=4, max_prefill_tokens=prefill, target_itl_ms=0.0)
    built = build_engine(folder, "experts", config, scheduler)
    engine = InProcessEngine(built.runner, built.info, scheduler)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
        asked = [
            GenerateRequest(id=str(i), prompt=pack_tokens(p), sampling=params) for i, p in enumerate(PROMPTS)
        ]
        answer(engine, asked, {})
        return engine.stats().experts
    finally:
        engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_checkpoint(MODELS["moe_published_bf16"], tmp_path_factory.mktemp("experts"))


def test_every_computed_token_counts_once_a_choice(folder: Path) -> None:
    """Both devices and any chunks send the same tokens to the same experts."""
    found = [
        served(folder, backend, prefill=prefill)
        for backend, prefill in (("cpu", 128), ("cpu", 16), ("reference", 128))
    ]
    tables = [counts(experts) for experts in found if experts is not None]
    assert len(tables) == 3
    computed = sum(len(p) + DECODED - 1 for p in PROMPTS)
    assert tables[0].shape == (4, 8)
    assert (tables[0].sum(axis=1) == CHOSEN * computed).all()
    assert tables[0].max() <= computed  # an expert is chosen at most once a token
    np.testing.assert_array_equal(tables[1], tables[0])
    np.testing.assert_array_equal(tables[2], tables[0])


def test_nothing_is_counted_unasked(folder: Path) -> None:
    assert served(folder, "cpu", prefill=128, expert_stats=False) is None
