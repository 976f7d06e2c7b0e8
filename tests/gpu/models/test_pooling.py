"""Vectors of prompts on a GPU beside the CPU's exact path, whatever cuts the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, SlotBlocks
from pegainfer.engine.config import SchedulerConfig
from pegainfer.runtime.cuda.driver import probe
from tests.support.pooled import PooledPrompts, vector
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3

MODEL = TinyQwen3(
    "pooled", seed=7, dtype="bf16",
    config={"head_dim": 128, "hidden_size": 256, "vocab_size": 1000, "max_position_embeddings": 1024},
)  # fmt: skip
IDS = np.random.default_rng(7).integers(0, 1000, 40).tolist()
NEAR = 0.02  # of the vector's length: bf16's roundings through the layers
# Fewer slots than tokens of a step, so that a row's hidden states come in several parts.
SCHEDULER = SchedulerConfig(max_slots=3, max_prefill_tokens=48)

pytestmark = pytest.mark.gpu


def prompts(folder: Path, **config: Any) -> PooledPrompts:
    return PooledPrompts(
        build_engine(folder, "m", EngineConfig(max_model_len=64, **config), SCHEDULER).runner
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PooledPrompts, PooledPrompts]]:
    """On the GPU, and exactly."""
    if (reason := probe()) is not None:
        pytest.skip(reason)
    folder = write_checkpoint(MODEL, tmp_path_factory.mktemp("pooled"))
    gpu = prompts(folder, backend="cuda", gpu_memory_utilization=0.9, kv_cache_memory=1 << 22)
    exact = prompts(folder, backend="cpu", activation="f32", kv_dtype="f32", kv_cache_memory=1 << 22)
    yield gpu, exact
    gpu.runner.close()
    exact.runner.close()


def apart(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("sizes", [[40], [16, 16, 8], [1, 38, 1], [1]], ids=str)
def test_a_vector_is_the_exact_one(
    pooling: str, sizes: list[int], both: tuple[PooledPrompts, PooledPrompts]
) -> None:
    ids = IDS[: sum(sizes)]
    got, want = (vector(p.embed(ids, pooling, sizes)) for p in both)
    assert got.shape == (256,) and apart(got, want) < NEAR
    other = vector(both[1].embed(ids[::-1] if len(ids) > 1 else IDS[1:2], pooling, [len(ids)]))
    assert apart(got, other) > 10 * NEAR


def test_only_who_asks_is_pooled(both: tuple[PooledPrompts, PooledPrompts]) -> None:
    """Beside others, with two steps in flight."""
    gpu, exact = both
    asks = SamplingParams(temperature=0.0, max_tokens=1, pooling="mean")
    plain = SamplingParams(temperature=0.0)
    news = tuple(
        NewSlot(slot=i, seq=i, tokens=pack_tokens(IDS[: 9 + i]), num_prompt=9 + i, sampling=s, seed=0)
        for i, s in enumerate((plain, asks, plain))
    )
    blocks = tuple(SlotBlocks(i, 0, (4 + i,)) for i in range(3))
    first = gpu.start(news=news, blocks=blocks, rows=tuple(Row(i, 0, 5, False) for i in range(3)))
    second = gpu.start(rows=tuple(Row(i, 5, 4 + i, True) for i in range(3)))
    assert first.wait().pooled == {}
    result = second.wait()
    assert list(result.pooled) == [1]
    gpu.run(frees=(0, 1, 2))
    want = vector(exact.embed(IDS[:10], "mean", [10]))
    assert apart(np.frombuffer(result.pooled[1], "<f4"), want) < NEAR
