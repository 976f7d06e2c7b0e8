"""KV tiers of the GPU's runner, over a driver whose memory is the host's and whose copies are at once."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.step import StepPlan, StepResult
from pegainfer.contract.tiers import DEVICE, Transfer
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kv.device.store import Bytes, HostStore, StoreError
from pegainfer.lower.cuda import planning  # noqa: F401  (registers the ops before some are replaced)
from pegainfer.lower.cuda.lowering import HANDLERS
from pegainfer.runner.cuda import CudaRunner
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels
from tests.support.toyhybrid.checkpoint import register, write_toy

TOY = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "delta_dim": 128, "vocab_size": 1000
}  # fmt: skip
PAGES, STATES, HOST, DISK = 0, 1, 1, 2
KEY = bytes(range(32))


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda() as fake:
        yield fake


class Bench:
    """A runner with a host and a disk tier, and steps that wait for transfers."""

    def __init__(self, runner: CudaRunner) -> None:
        self.runner = runner
        self.step = 0

    def run(self, *transfers: Transfer, **more: Any) -> StepResult:
        """One plan with transfers, then plans without rows until all have ended; the sum of their results."""
        landed: list[int] = []
        failed: dict[int, str] = {}
        blocks = 0
        deadline = time.monotonic() + 60
        left, parts = len(transfers), {"transfers": transfers, **more}
        while left or parts:
            assert time.monotonic() < deadline
            self.step += 1
            plan = StepPlan(step=self.step, wait_transfers=True, **parts)
            result = self.runner.sample(self.runner.forward(plan)).wait()
            landed += result.landed
            failed |= result.failed
            blocks += sum(t.blocks for t in result.traffic)
            left, parts = len(transfers) - len(landed) - len(failed), {}
        assert blocks == len(landed)
        return StepResult(step=self.step, tokens=(), landed=tuple(sorted(landed)), failed=failed)

    def memory(self, group: int, block: int) -> list[Bytes]:
        """Views of a device block's parts."""
        return [
            np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address + block * n))
            for address, n in self.runner._parts.pools.places[group]
        ]

    def fill(self, group: int, block: int, seed: int) -> None:
        for i, part in enumerate(self.memory(group, block)):
            part[:] = np.random.default_rng([seed, i]).integers(0, 256, len(part), np.uint8)

    def holds(self, group: int, block: int, seed: int) -> bool:
        wanted = [np.random.default_rng([seed, i]).integers(0, 256, len(p), np.uint8)
                  for i, p in enumerate(self.memory(group, block))]  # fmt: skip
        return all((a == b).all() for a, b in zip(self.memory(group, block), wanted, strict=True))


@pytest.fixture
def bench(fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    for op in ("causal_conv_silu", "gated_delta_rule", "gated_rms_norm"):
        monkeypatch.setitem(HANDLERS, op, lambda c: None)
    register(monkeypatch)
    folder = write_toy(tmp_path / "model", dtype="bf16", **TOY)
    config = EngineConfig(
        backend="cuda", max_model_len=128, kv_cache_memory=1 << 25, kv_offload=1 << 23,
        kv_offload_disk=f"{tmp_path / 'tier'}:16MiB",
    )  # fmt: skip
    runner = build_engine(folder, "m", config, SchedulerConfig(max_slots=3)).runner
    assert isinstance(runner, CudaRunner)
    yield Bench(runner)
    runner.close()


def test_blocks_of_all_groups_come_back_from_host_and_disk(bench: Bench) -> None:
    assert [tier.kind for tier in bench.runner.info.tiers] == ["host", "disk"]
    for group, block in ((PAGES, 5), (STATES, 2)):
        bench.fill(group, block, 7)
        keys = {"rank": 0, "key": KEY}
        down = Transfer(10 * bench.step + 1, group, DEVICE, block, HOST, 1, **keys)
        assert bench.run(down).landed == (down.id,)
        lower = Transfer(10 * bench.step + 2, group, HOST, 1, DISK, 3, **keys)
        assert bench.run(lower).landed == (lower.id,)
        for pool, source in ((HOST, 1), (DISK, 3)):
            bench.fill(group, block, 8)
            up = Transfer(10 * bench.step + 3, group, pool, source, DEVICE, block, **keys)
            assert bench.run(up).landed == (up.id,)
            assert bench.holds(group, block, 7)


def test_one_copy_a_part_whatever_the_number_of_layers(bench: Bench, fake: FakeCuda) -> None:
    for group, parts in ((PAGES, 1), (STATES, 2)):
        before = fake.calls["cuMemcpyDtoHAsync"]
        bench.run(Transfer(bench.step + 1, group, DEVICE, 0, HOST, 0, 0, KEY))
        assert fake.calls["cuMemcpyDtoHAsync"] - before == parts


def test_a_batch_of_copies_is_waited_for_once(bench: Bench, fake: FakeCuda) -> None:
    for block in range(8):
        bench.fill(PAGES, block, block)
    down = [Transfer(i + 1, PAGES, DEVICE, i, HOST, i, 0, bytes([i]) * 32) for i in range(8)]
    transfers = bench.runner._transfers
    assert transfers is not None
    before = fake.calls["cuStreamSynchronize"]
    transfers._in_flight += len(down)
    transfers._run(down)
    assert fake.calls["cuStreamSynchronize"] - before == 1
    assert sorted(transfers.collect().landed) == list(range(1, 9))


def test_a_failed_copy_fails_its_transfer_and_the_block_is_not_kept(bench: Bench, fake: FakeCuda) -> None:
    from tests.support.fake_cuda import ILLEGAL_ADDRESS

    fake.fail["cuMemcpyDtoHAsync"] = ILLEGAL_ADDRESS
    transfers = bench.runner._transfers
    assert transfers is not None
    transfers.start([Transfer(1, PAGES, DEVICE, 0, HOST, 0, 0, KEY)])
    ended = transfers.collect(60.0)
    del fake.fail["cuMemcpyDtoHAsync"]
    assert not ended.landed and "cuMemcpyDtoHAsync" in ended.failed[1]
    with pytest.raises(StoreError):
        transfers._stores[0].read(PAGES, 0, KEY, lambda data: None)


def test_a_reset_empties_host_and_disk(bench: Bench) -> None:
    bench.run(Transfer(1, PAGES, DEVICE, 0, HOST, 0, 0, KEY), Transfer(2, PAGES, DEVICE, 1, DISK, 0, 0, KEY))
    up = (Transfer(3, PAGES, HOST, 0, DEVICE, 0, 0, KEY), Transfer(4, PAGES, DISK, 0, DEVICE, 1, 0, KEY))
    ended = bench.run(*up, reset_tiers=True)
    assert not ended.landed and set(ended.failed) == {3, 4}


def test_page_locked_memory_is_freed_with_the_runner(bench: Bench, fake: FakeCuda) -> None:
    store = bench.runner._transfers._stores[0]  # type: ignore[union-attr]
    assert isinstance(store, HostStore) and store._thread is not None
    store._thread.join()
    before = fake.pinned
    transfers = bench.runner._transfers
    assert transfers is not None
    transfers.close()
    assert before - fake.pinned >= 7 << 20
    bench.runner._transfers = None


def test_a_write_waits_for_its_slab_and_a_tier_without_memory_refuses(monkeypatch: Any) -> None:
    made: list[int] = []

    def allocate(nbytes: int) -> Bytes:
        if len(made) == 2:
            raise MemoryError
        time.sleep(0.01)
        made.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    store = HostStore([100], [10], allocate, slab_bytes=350)
    store.write(0, 5, KEY, lambda out: out.fill(3))  # in the second slab
    assert made == [300, 300]
    with pytest.raises(StoreError, match="no memory"):
        store.write(0, 6, KEY, lambda out: out.fill(3))
    store.read(0, 5, KEY, lambda data: np.testing.assert_array_equal(data, 3))
    store.close()
