"""The GPU's runner for a line with pages and states, over a driver that computes nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import BlockCopy, NewSlot, Row, SlotBlocks, StateSnapshot, StepPlan
from pegainfer.engine.config import SchedulerConfig
from pegainfer.lower.cuda import planning  # noqa: F401  (registers the ops before some are replaced)
from pegainfer.lower.cuda.lowering import HANDLERS
from pegainfer.runner.buckets import Bucket
from pegainfer.runner.cuda import CudaRunner
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels
from tests.support.hybrid_traffic import check_coverage, memory_of, run
from tests.support.toyhybrid.checkpoint import register, write_toy

TOY = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "delta_dim": 128, "vocab_size": 1000
}  # fmt: skip
PAGES, STATES = 0, 1  # groups
PROMPT = list(range(3, 43))
NONE = -1
TIE = 0.0  # nat; requests are greedy with it


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda() as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    for op in ("causal_conv_silu", "gated_delta_rule", "gated_rms_norm"):
        monkeypatch.setitem(HANDLERS, op, lambda c: None)
    register(monkeypatch)
    return write_toy(tmp_path / "model", dtype="bf16", **TOY)


def built(folder: Path, slots: int = 3, **more: Any) -> CudaRunner:
    config = EngineConfig(**{"backend": "cuda", "max_model_len": 128, "kv_cache_memory": 1 << 25} | more)
    runner = build_engine(folder, "m", config, SchedulerConfig(max_slots=slots)).runner
    assert isinstance(runner, CudaRunner)
    return runner


@pytest.fixture
def runner(fake: FakeCuda, folder: Path) -> Iterator[CudaRunner]:
    runner = built(folder)
    for rows in (1, 2):  # A slow machine's start may not have made them ready.
        runner._sizes.make(Bucket(rows, rows, True), at_once=True)
    yield runner
    runner.close()


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def prefill(runner: CudaRunner, slot: int, state: int, step: int, **more: Any) -> None:
    new = NewSlot(
        slot=slot, seq=slot, tokens=pack_tokens(PROMPT), num_prompt=len(PROMPT),
        sampling=SamplingParams(temperature=0.0), seed=1,
    )  # fmt: skip
    blocks = (SlotBlocks(slot, PAGES, (7, 3, 5)), SlotBlocks(slot, STATES, (state,)))
    rows = (Row(slot, 0, len(PROMPT), True),)
    plan = StepPlan(step=step, news=(new,), blocks=blocks, rows=rows, **more)
    runner.sample(runner.forward(plan)).wait()


def decode(runner: CudaRunner, step: int, *places: tuple[int, int], **more: Any) -> None:
    """One token of each of these slots at these positions."""
    plan = StepPlan(step=step, rows=tuple(Row(s, p, 1, True, True) for s, p in places), **more)
    runner.sample(runner.forward(plan)).wait()


def uploads(fake: FakeCuda, run: Any, *args: Any, **more: Any) -> int:
    before = fake.calls["cuMemcpyHtoDAsync"]
    run(*args, **more)
    return fake.calls["cuMemcpyHtoDAsync"] - before


def test_memory_is_divided_and_every_part_has_its_pool(runner: CudaRunner) -> None:
    pages, states = runner.info.num_blocks
    parts = runner._parts.pools.states
    assert {n: (t.shape, t.dtype) for n, t in parts.items()} == {
        "kv": ((pages, 2, 2, 2, 16, 64), "bf16"),
        "conv": ((states, 2, 3, 1024), "bf16"),
        "delta": ((states, 2, 4, 128, 128), "f32"),
    }
    assert sum(t.nbytes for t in parts.values()) <= 1 << 25
    state = sum(parts[n].nbytes for n in ("conv", "delta")) // states
    assert states == 3 + int(((1 << 25) - 3 * state) * 0.3) // state


def test_states_that_do_not_fit_are_refused(fake: FakeCuda, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"states of max_slots sequences.*200 sequences.*--max-num-seqs"):
        built(folder, slots=200)


def test_tables_of_all_groups_lie_side_by_side(runner: CudaRunner) -> None:
    prefill(runner, 1, 9, 1)
    tables = runner._parts.state.tables
    # Eight blocks for 128 tokens, then the state, padded to 16 bytes.
    assert tables.shape == (3, 12)
    count = 4
    assert words(runner._parts.state._changes.address, 3 * count) == [
        *(7, 3, 5, 9), *(1, 1, 1, 1), *(0, 1, 2, 8),
    ]  # fmt: skip


def test_a_prefill_stages_states_and_saves(runner: CudaRunner) -> None:
    snapshots = (StateSnapshot(2, STATES, 16, 4), StateSnapshot(2, STATES, 32, 5))
    prefill(runner, 2, 6, 1, snapshots=snapshots)
    forward = runner._parts.forward
    env = {"T": len(PROMPT), "R": 1, "L": 1}
    ids, saves = (forward.input_address(f"mix.state_{n}", env) for n in ("ids", "saves"))
    bucket = runner._sizes.buckets.of(len(PROMPT), 1, False)
    assert words(ids, bucket.rows) == [6] + [NONE] * (bucket.rows - 1)
    want = [NONE] * bucket.tokens
    want[15], want[31] = 4, 5
    assert words(saves, bucket.tokens) == want


def test_a_batch_that_goes_on_sends_nothing_but_a_snapshot(fake: FakeCuda, runner: CudaRunner) -> None:
    for slot in (0, 1):
        prefill(runner, slot, slot, slot + 1)
    rows = ((1, 40), (0, 40))
    assert uploads(fake, decode, runner, 3, *rows) == 2  # rows, sampling
    batch = runner._parts.state.batch.address
    assert words(batch, 9) == [2, 1, 40, 0, NONE, 0, 40, 1, NONE]
    for step in (4, 5):
        at = 37 + step
        assert uploads(fake, decode, runner, step, (1, at), (0, at), repeats=True) == 0
    saved = (StateSnapshot(0, STATES, 44, 8),)  # the second row's state after position 43
    graphs = fake.graph_launches
    assert uploads(fake, decode, runner, 6, (1, 43), (0, 43), repeats=True, snapshots=saved) == 1
    assert words(batch, 9) == [2, 1, 43, 0, NONE, 0, 43, 1, 8]
    # Named once more, as the row may not have passed it; it has.
    assert uploads(fake, decode, runner, 7, (1, 44), (0, 44), repeats=True, snapshots=saved) == 0
    assert fake.graph_launches == graphs + 2
    assert runner._end_repeats() is not None and runner._slots.known[:2].tolist() == [46, 46]


def test_a_copy_of_a_state_copies_every_part(runner: CudaRunner) -> None:
    parts = runner._parts.pools.states
    states = runner.info.num_blocks[STATES]
    for name, value in (("conv", 3), ("delta", 4)):
        each = parts[name].nbytes // states
        ctypes.memset(parts[name].address + each, value, each)
    runner.sample(runner.forward(StepPlan(step=1, copies=(BlockCopy(STATES, 1, 2),)))).wait()
    for name, value in (("conv", 3), ("delta", 4)):
        each = parts[name].nbytes // states
        assert ctypes.string_at(parts[name].address + 2 * each, each) == bytes([value]) * each


def test_random_traffic_makes_no_impossible_step(fake: FakeCuda, folder: Path) -> None:
    """Nothing is computed, so that every token is 0; the host's side of copies, snapshots and steps runs."""
    check_coverage(run(folder, 400, tie=TIE, backend="cuda", **memory_of(folder, backend="cuda")))
