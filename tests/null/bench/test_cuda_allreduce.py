"""The bench of sums over ranks, with a driver that computes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from bench import cuda_allreduce as bench
from pegainfer.lower.cuda import ranks as lowering
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runtime.cuda.driver import CudaError
from pegainfer.runtime.rank_memory import RankMemory
from tests.null.lower.cuda.test_memory import words
from tests.support.fake_cuda import FakeCuda, fake_cuda, fake_kernels

KINDS = ("tagged", "one-shot", "two-shot")


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(FakeCuda(keep_freed=True)) as fake:
        yield fake


@pytest.fixture
def ctx(fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaContext:
    """Of rank 0 of two, which runs alone."""
    for name in ("TAGGED_MOST", "ONE_SHOT_MOST"):  # the bench changes them
        monkeypatch.setattr(lowering, name, getattr(lowering, name))
    return CudaContext(kernels=fake_kernels(tmp_path), group=RankMemory.create(2))


@pytest.mark.parametrize("kind", KINDS)
def test_launches_point_into_memory_that_is_held(kind: str, ctx: CudaContext, fake: FakeCuda) -> None:
    sums = bench.OwnSums(ctx, kind)
    for size in bench.SIZES:
        work = sums.work(size)
        assert work
        for launch in work:
            stale = [hex(word) for word in words(launch) if fake.was_freed(word)]
            assert not stale, f"{size} bytes: {launch} points to {stale}"


class BrokenNccl:
    """A library whose communicators fail."""

    def __init__(self) -> None:
        self.ncclGetUniqueId = Mock(return_value=0)
        self.ncclCommInitRank = Mock(return_value=5)
        self.ncclGetErrorString = Mock(side_effect=lambda code: f"error {code}".encode())


def test_a_failure_of_nccl_comes_after_all_own_figures(
    ctx: CudaContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "find_nccl", BrokenNccl)
    memory = RankMemory.create(2)
    monkeypatch.setattr(memory, "exchange", lambda data: [data, b"-"])
    rows: list[dict[str, object]] = []
    with pytest.raises(CudaError, match="ncclCommInitRank failed; got error 5"):
        for row in bench.measure(ctx, memory, False):
            rows.append(row)
    assert [(row["bytes"], row["kind"]) for row in rows] == [(s, k) for s in bench.SIZES for k in KINDS]


@pytest.mark.parametrize(("shared", "why"), [(False, "not found"), (True, "share a GPU")])
def test_own_figures_are_there_without_nccl(
    shared: bool, why: str, ctx: CudaContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "find_nccl", lambda: None)
    *rows, last = bench.measure(ctx, RankMemory.create(2), shared)
    assert [(row["bytes"], row["kind"]) for row in rows] == [(s, k) for s in bench.SIZES for k in KINDS]
    # An event is 1 ms after the other one, with 20 sums between them.
    assert {row["us"] for row in rows} == {50.0}
    assert why in str(last["note"])


def test_ranks_that_fail_end_with_one_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(bench.__file__), "--output", str(tmp_path / "rows.jsonl")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    (message,) = done.stderr.splitlines()
    assert message.startswith(("rank 0: CudaError: ", "rank 1: CudaError: "))
