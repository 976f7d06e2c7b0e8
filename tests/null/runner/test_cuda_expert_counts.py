"""Tokens of experts counted on a GPU, over a driver that computes nothing: which, and when they are read."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.experts import CountingRunner
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, SlotBlocks, StepPlan
from pegainfer.engine.config import SchedulerConfig
from pegainfer.runner.cuda import CudaRunner
from pegainfer.runner.cuda_expert_counts import PERIOD
from tests.support.fake_cuda import FakeCuda, Launched, fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels
from tests.support.tinyqwen3moe import MODELS

CONFIG = MODELS["true_heads_bf16"].hf_config()
CHOSEN, EXPERTS = CONFIG["num_experts_per_tok"], CONFIG["num_experts"]
MIXED = [i for i in range(CONFIG["num_hidden_layers"]) if not MODELS["true_heads_bf16"].is_dense(i)]
LAYERS = len(MIXED)
PROMPT = list(range(5))


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda() as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def built(folder: Path, **more: Any) -> CudaRunner:
    config = EngineConfig(
        backend="cuda", load_format="dummy", max_model_len=64, kv_cache_memory=1 << 22, **more
    )
    runner = build_engine(folder, "m", config, SchedulerConfig(max_slots=2)).runner
    assert isinstance(runner, CudaRunner) and isinstance(runner, CountingRunner)
    return runner


def decode(step: int, position: int, **parts: Any) -> StepPlan:
    return StepPlan(step=step, rows=(Row(0, position, 1, True, True),), **parts)


def plans() -> list[StepPlan]:
    """A prompt, a decoded token, and two steps that repeat it."""
    greedy = SamplingParams(temperature=0.0)
    new = NewSlot(slot=0, seq=0, tokens=pack_tokens(PROMPT), num_prompt=len(PROMPT), sampling=greedy, seed=1)
    rows, blocks = (Row(0, 0, len(PROMPT), True),), (SlotBlocks(0, 0, (3,)),)
    first = StepPlan(step=1, news=(new,), blocks=blocks, rows=rows)
    return [first, decode(2, 5), *(decode(n, 3 + n, repeats=True) for n in (3, 4))]


def numbers(launch: Launched) -> list[int]:
    """tokens, K, N."""
    params = (ctypes.c_void_p * 5).from_address(launch.params)
    return [ctypes.c_int32.from_address(p or 0).value for p in list(params)[2:]]


def test_the_tokens_of_each_step_are_counted_once(fake: FakeCuda, folder: Path) -> None:
    runner = built(folder, expert_stats=True)
    found = []
    for plan in plans():
        fake.launches.clear()
        runner.sample(runner.forward(plan)).wait()
        launches = [launch for launch in fake.launches if launch.kernel == "count_experts"]
        found.append([(launch.grid, numbers(launch)) for launch in launches])
    assert found == [[((LAYERS, 1, 1), [n, CHOSEN, EXPERTS])] for n in (5, 1, 1, 1)]
    outputs = runner._parts.forward.outputs({"T": 1, "R": 1, "L": 1})
    assert runner._experts is not None
    table = list((ctypes.c_uint64 * LAYERS).from_address(runner._experts._table.address))
    assert table == [outputs[f"experts.{i}"].address for i in MIXED]
    runner.close()


def test_nothing_is_launched_unasked(fake: FakeCuda, folder: Path) -> None:
    runner = built(folder)
    for plan in plans():
        runner.sample(runner.forward(plan)).wait()
    assert runner.expert_tokens() is None
    assert not any(launch.kernel == "count_experts" for launch in fake.launches)
    runner.close()


def test_totals_are_read_at_rest_and_seldom_while_steps_go_on(fake: FakeCuda, folder: Path) -> None:
    runner = built(folder, expert_stats=True)
    counts, now, busy = runner._experts, [10.0], [False]
    assert counts is not None
    counts._clock = lambda: now[0]
    counts._parts.stream.done = lambda: not busy[0]  # type: ignore[method-assign]
    totals = (ctypes.c_int64 * (LAYERS * EXPERTS)).from_address(counts._totals.address)

    def read() -> int:
        found = runner.expert_tokens()
        assert found is not None and (found.layers, found.num_experts) == (tuple(MIXED), EXPERTS)
        return int(np.frombuffer(found.tokens, "<i8")[-1])

    assert read() == 0
    totals[LAYERS * EXPERTS - 1] = 7
    assert read() == 0  # no step was counted since: the device is not asked
    counts.add(1)
    assert read() == 7
    busy[0], totals[LAYERS * EXPERTS - 1] = True, 8
    counts.add(1)
    assert read() == 7
    now[0] += PERIOD
    assert read() == 8
    totals[LAYERS * EXPERTS - 1] = 9
    counts.add(1)
    assert read() == 8
    busy[0] = False
    assert read() == 9
    runner.close()


def test_several_ranks_do_not_count() -> None:
    with pytest.raises(ConfigError, match="counted by one rank alone; expected 1; got 2"):
        EngineConfig(backend="cuda", tensor_parallel_size=2, expert_stats=True).check_backend()
