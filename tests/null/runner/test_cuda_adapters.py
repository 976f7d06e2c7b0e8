"""Adapters in a GPU's slots, over a driver that computes nothing: their layout and the inputs of a step."""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.app.gpu_memory import Budget
from pegainfer.app.load import open_model
from pegainfer.contract.errors import InvariantError
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, SlotBlocks, StepPlan
from pegainfer.engine.config import SchedulerConfig
from pegainfer.runner import cuda_adapters
from pegainfer.runner.adapters import AdapterReader
from pegainfer.runner.cuda import CudaRunner
from pegainfer.runtime.cuda.tensor import NUMPY, DeviceTensor, encode
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels
from tests.support.tinylora import ADAPTERS, write_adapter
from tests.support.tinyqwen3 import TinyQwen3

MODEL = TinyQwen3("gpu", seed=5, dtype="bf16", config={"head_dim": 64})
SLOTS, RANK = 3, 8


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaRunner]:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    monkeypatch.setattr(cuda_adapters, "RING_BYTES", 4096)  # so that factors are sent in several pieces
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL.hf_config()))
    config = EngineConfig(
        backend="cuda", load_format="dummy", max_model_len=64, kv_cache_memory=1 << 22, enable_lora=True,
        max_loras=SLOTS, max_lora_rank=RANK,
    )  # fmt: skip
    with fake_cuda(FakeCuda()):
        made = build_engine(tmp_path / "model", "m", config, SchedulerConfig(max_slots=3)).runner
        assert isinstance(made, CudaRunner)
        yield made
        made.close()


def held(state: DeviceTensor) -> np.ndarray[Any, Any]:
    """The fake device's memory is the host's."""
    raw = (ctypes.c_char * state.nbytes).from_address(state.address)
    return np.frombuffer(raw, NUMPY[state.dtype]).reshape(state.shape).copy()


def states(runner: CudaRunner) -> dict[str, DeviceTensor]:
    assert runner._adapters is not None
    return runner._adapters.states


@pytest.mark.parametrize("name", ["plain", "embedding_and_head", "rank_stabilised_patterns"])
def test_factors_lie_in_their_slot_and_no_other(name: str, runner: CudaRunner, tmp_path: Path) -> None:
    folder = write_adapter(ADAPTERS[name], MODEL, tmp_path / name)
    before = {key: held(state) for key, state in states(runner).items()}
    info, adapter = runner.read_adapter(name, str(folder))
    runner.install_adapter(1, adapter)
    assert runner._adapters is not None
    _, exact = AdapterReader(runner._adapters._weights, RANK).read(name, str(folder))
    assert set(exact) == set(adapter) and info.rank == max(f.rank for f in exact.values())
    for w in runner._adapters._weights:
        down, up, ranks = (held(states(runner)[f"{w.key}.{part}"]) for part in ("down", "up", "ranks"))
        factors = exact.get(w.key)
        rank = 0 if factors is None else factors.rank
        assert ranks.tolist() == [0, rank, 0]
        for i in (0, 2):
            assert np.array_equal(down[i], before[f"{w.key}.down"][i])
            assert np.array_equal(up[i], before[f"{w.key}.up"][i])
        if factors is not None:
            own = down[1, :, :rank] if w.base.embedding else down[1, :rank]
            assert np.array_equal(own, encode(factors.down, "bf16"))
            assert np.array_equal(up[1, :rank], encode(factors.up, "bf16"))
    runner.remove_adapter(1)
    assert all(not held(s).any() for key, s in states(runner).items() if key.endswith(".ranks"))


def test_wrong_indices_are_faults(runner: CudaRunner, tmp_path: Path) -> None:
    adapter = runner.read_adapter("a", str(write_adapter(ADAPTERS["plain"], MODEL, tmp_path / "a")))[1]
    runner.install_adapter(0, adapter)
    for index in (0, SLOTS, -1):
        with pytest.raises(InvariantError, match="is taken or does not exist"):
            runner.install_adapter(index, adapter)
    with pytest.raises(InvariantError, match="removed but not installed"):
        runner.remove_adapter(1)


def test_a_new_sequence_s_adapter_is_sent_behind_its_tables(runner: CudaRunner) -> None:
    state = runner._parts.state
    news = tuple(
        NewSlot(slot=s, seq=s + 1, tokens=pack_tokens([5, 6]), num_prompt=2,
                sampling=SamplingParams(temperature=0.0), seed=0, adapter=a)
        for s, a in ((0, 2), (2, -1))
    )  # fmt: skip
    sent: list[tuple[list[int], list[int], list[int]]] = []
    extend = state.extend
    state.extend = lambda *args: sent.append(args) or extend(*args)  # type: ignore[method-assign,func-returns-value]
    blocks = (SlotBlocks(0, 0, (3,)), SlotBlocks(2, 0, (4,)))
    rows = (Row(0, 0, 2, True), Row(2, 0, 2, True))
    step = runner.forward(StepPlan(step=1, news=news, blocks=blocks, rows=rows))
    assert sent[0] == ([0, 2], [state._adapter_column] * 2, [2, -1])
    assert state._adapter_column < state.tables.shape[1]
    assert [column for _, columns, _ in sent[1:] for column in columns] == [0, 0]
    runner.sample(step)


def test_steps_in_which_no_row_has_an_adapter_run_the_plain_program(runner: CudaRunner) -> None:
    parts, ran = runner._parts, list[str]()
    assert parts.adapted is not None
    for name, executor in (("plain", parts.forward), ("adapted", parts.adapted)):
        for way in ("run", "replay"):
            monitored = getattr(executor, way)
            note = partial(lambda name, run, *args: ran.append(name) or run(*args), name, monitored)  # type: ignore[func-returns-value]
            setattr(executor, way, note)

    def new(slot: int, adapter: int) -> NewSlot:
        return NewSlot(slot=slot, seq=slot + 1, tokens=pack_tokens([5, 6]), num_prompt=2,
                       sampling=SamplingParams(temperature=0.0), seed=0, adapter=adapter)  # fmt: skip

    def step(number: int, **plan: Any) -> None:
        runner.sample(runner.forward(StepPlan(step=number, **plan))).wait()

    step(1, news=(new(0, -1),), blocks=(SlotBlocks(0, 0, (3,)),), rows=(Row(0, 0, 2, True),))
    step(2, rows=(Row(0, 2, 1, True),))
    step(
        3, news=(new(1, 2),), blocks=(SlotBlocks(1, 0, (4,)),), rows=(Row(0, 3, 1, True), Row(1, 0, 2, True))
    )
    step(4, rows=(Row(0, 4, 1, True), Row(1, 2, 1, True)))
    step(5, rows=(Row(0, 5, 1, True),))
    step(6, rows=(Row(1, 3, 1, True),), frees=(0,))
    assert ran == ["plain", "plain", "adapted", "adapted", "plain", "adapted"]


def test_both_programs_share_outputs_and_weights(runner: CudaRunner) -> None:
    parts = runner._parts
    assert parts.adapted is not None
    env = {"T": 3, "R": 3, "L": 3}
    for name, output in parts.adapted.outputs(env).items():
        assert parts.forward.outputs(env)[name].address == output.address
    shared = runner._parts.adapted._weights  # type: ignore[attr-defined]
    layouts = Counter(names for names, _, _ in shared._held)
    assert set(layouts.values()) == {1}
    once = Counter(name for names in layouts for name in names)
    assert set(once.values()) == {1}, "a matrix is held twice"


def test_the_memory_plan_counts_what_the_slots_take(runner: CudaRunner, tmp_path: Path) -> None:
    with open_model(tmp_path / "model", "dummy") as (model, _):
        assert model.adapter_bytes(runner.info) == sum(state.nbytes for state in states(runner).values())
    budget = Budget(total=100, used=10, weights=20, steps=5, adapters=15, allowed=90)
    assert budget.cache == 40 and "adapters" in str(budget)
