"""Random traffic with host and disk tiers, with faults in every copy, across a restart: no token differs."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pegainfer.engine.restore_cost import RestoreCost
from pegainfer.kv.device import disk
from pegainfer.kv.device.pool import HostPools
from pegainfer.kv.device.store import BlockStore, HostStore, StoreError
from tests.support.hybrid_traffic import LENGTH, memory_of, run
from tests.support.tinymodel import Tiny, write_checkpoint
from tests.support.tinyqwen3_5 import MODELS

STEPS = int(os.environ.get("TIER_STEPS", "250"))
WIDE = {"intermediate_size": 128, "max_position_embeddings": 512}
OFF = {"kv_offload": 0, "kv_offload_disk": ""}


@pytest.fixture(autouse=True)
def load_whatever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model this small it depends on the machine's load whether a load is quicker than computing."""
    monkeypatch.setattr(RestoreCost, "is_worth", lambda self, nbytes, compute_seconds: True)


def options(folder: Path, tier: Path) -> dict[str, Any]:
    """A cache in which 8 sequences displace each other, above twice as much host memory and a larger disk."""
    memory = memory_of(folder)
    size = memory["kv_cache_memory"]
    return {
        **memory, "kv_offload": 2 * size, "kv_offload_disk": f"{tier}:{40 * size}", "backend": "cpu",
        "activation": "f32", "kv_dtype": "f32", "threads": 1, "alone": OFF,
    }  # fmt: skip


def test_a_restart_finds_what_the_disk_holds(tmp_path: Path) -> None:
    folder = write_checkpoint(MODELS["published_bf16"], tmp_path / "model")
    first = run(folder, STEPS, **options(folder, tmp_path / "tier"))
    assert first["differences"] == 0
    assert first["host tier: tokens loaded"] + first["disk tier: tokens loaded"] > 0
    assert first["host tier: bytes saved"] > 0 and first["disk tier: bytes saved"] > 0
    assert first["host tier: failures"] == first["disk tier: failures"] == 0
    again = run(folder, STEPS // 4, **options(folder, tmp_path / "tier"))
    assert again["differences"] == 0
    assert again["disk tier: tokens loaded"] > 0


def test_faults_in_every_copy_cost_no_request_and_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in eight copies fails before, in or after it; one in eight records is damaged on its way."""
    r = random.Random(3)
    seen = dict.fromkeys(("before", "inside", "after", "damaged"), 0)

    def happens(what: str) -> bool:
        seen[what] += (hit := r.random() < 0.125)
        return hit

    def faulty(store: type[BlockStore], name: str) -> None:
        real = getattr(store, name)

        def call(self: BlockStore, g: int, block: int, key: bytes, use: Any) -> None:
            if happens("before"):
                raise StoreError("planted")
            real(self, g, block, key, use)
            if happens("after"):
                raise StoreError("planted")

        monkeypatch.setattr(store, name, call)

    for store in (HostStore, disk.DiskStore):
        faulty(store, "read")
        faulty(store, "write")
    for name in ("gather", "scatter"):
        copy = getattr(HostPools, name)

        def half(self: HostPools, g: int, block: int, data: Any, copy: Any = copy) -> None:
            copy(self, g, block, data)
            if happens("inside"):
                data[: len(data) // 2] = 255
                raise OSError("planted")

        monkeypatch.setattr(HostPools, name, half)
    write = os.pwritev

    def damage(fd: int, buffers: Any, at: int) -> int:
        if happens("damaged"):
            buffers[0][r.randrange(len(buffers[0]) // 2)] ^= 1
        return write(fd, buffers, at)

    monkeypatch.setattr(disk.os, "pwritev", damage)
    folder = write_checkpoint(MODELS["published_bf16"], tmp_path / "model")
    for _ in range(2):
        counts = run(folder, STEPS, **options(folder, tmp_path / "tier"))
        assert counts["differences"] == 0
        assert counts["host tier: failures"] > 0 and counts["disk tier: failures"] > 0
    assert min(seen.values()) > 0, seen


def test_a_rank_that_has_lost_its_part_costs_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with a folder each; then one folder is lost, so that nothing stored lands on both."""
    monkeypatch.setattr("tests.support.hybrid_traffic.BATCH", 8)
    folder = write_checkpoint(Tiny("m", seed=5, config=WIDE), tmp_path / "model")
    size = 2 * 2 * 2 * 16 * 4 * LENGTH * 5 // 2  # bytes of two and a half sequences
    more: dict[str, Any] = {
        "kv_cache_memory": size, "kv_offload_disk": f"{tmp_path / 'tier'}:{40 * size}", "backend": "cpu",
        "activation": "f32", "threads": 1, "tensor_parallel_size": 2,
    }  # fmt: skip
    first = run(folder, 1, alone=OFF, **more)
    assert first["differences"] == 0
    shutil.rmtree(tmp_path / "tier" / "rank1")
    last = run(folder, 1, alone=OFF, **more)
    assert last["differences"] == 0 and last["disk tier: failures"] > 0
