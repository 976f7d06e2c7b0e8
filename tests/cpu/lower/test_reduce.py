"""Sums over ranks: the same bits on every rank, whoever comes first and however long the message is."""

from __future__ import annotations

import os
import random
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ConfigError, PeerFailedError
from pegainfer.lower.cpu.backend import CpuBackend, CpuOptions
from pegainfer.lower.cpu.executor import CpuExecutor
from pegainfer.ops.coarse import LM_HEAD
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.runtime.rank_memory import MAX_RANKS, SLOT_BYTES, RankMemory
from pegainfer.runtime.weights.weight import float32

Array = np.ndarray[Any, Any]
WIDTH = 1000  # not a multiple of a chunk or a block
LARGEST = 5 * SLOT_BYTES // 4 // WIDTH // 2  # rows: two and a half rounds


def two_sums() -> Program:
    """Two sums in a row of the same partial result, as a step has many."""
    b = Builder("sums")
    part = b.input("partial", "T", WIDTH, dtype="f32")
    start = b.input("start", "T", WIDTH, dtype="f32")
    b.emit(REDUCE_RESIDUAL, x=start, partial=part)
    b.emit(REDUCE_RESIDUAL, x=start, partial=part)
    return b.build()


def memories(ranks: int, seconds: float = 60.0) -> list[RankMemory]:
    first = RankMemory.create(ranks, seconds)
    return [first, *(RankMemory(os.dup(first.fd), rank, ranks, seconds) for rank in range(1, ranks))]


def executors(of: list[RankMemory]) -> list[tuple[CpuBackend, CpuExecutor]]:
    made = []
    for memory in of:
        backend = CpuBackend({}, CpuOptions(threads=1 + memory.rank % 2), memory)
        made.append((backend, backend.prepare(two_sums(), {}, {"T": LARGEST})))
    return made


def on_threads(calls: list[Any]) -> list[BaseException | None]:
    """Runs the calls at the same time, each after a delay of its own; what each raised."""
    errors: list[BaseException | None] = [None] * len(calls)

    def one(i: int, delay: float) -> None:
        time.sleep(delay)
        try:
            calls[i]()
        except BaseException as error:
            errors[i] = error

    threads = [threading.Thread(target=one, args=(i, random.random() * 2e-3)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    made = executors(memories(ranks))
    for rows in (1, 7, LARGEST, 1, 64, 3, 5):
        # Of such values float32 sums depend on their order.
        partials = [
            (rng.standard_normal((rows, WIDTH)) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
            for _ in range(ranks)
        ]
        start = rng.standard_normal((rows, WIDTH)).astype(np.float32)
        total = partials[0]
        for part in partials[1:]:
            total = total + part
        got = [start.copy() for _ in range(ranks)]
        inputs = [{"partial": p, "start": x} for p, x in zip(partials, got, strict=True)]
        calls = [
            partial(executor.run, own, {"T": rows}) for (_, executor), own in zip(made, inputs, strict=True)
        ]
        assert on_threads(calls) == [None] * ranks
        for mine in got:
            np.testing.assert_array_equal(mine, start + total + total)
    for backend, _ in made:
        backend.close()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_share_out_the_head_and_have_the_logits_of_one(ranks: int) -> None:
    """Bit by bit; more rows than a slot holds, and columns that do not divide."""
    rng = np.random.default_rng(ranks)
    vocab, hidden, most = 40_007, 32, 300
    weights = {
        "w": float32(rng.standard_normal((vocab, hidden)).astype(np.float32)),
        "norm": float32(np.ones(hidden, np.float32)),
    }
    b = Builder("head")
    x, rows = b.input("x", "T", hidden, dtype="f32"), b.input("rows", "L")
    norm, w = b.weight("norm", hidden, dtype="f32"), b.weight("w", vocab, hidden, dtype="f32")
    b.emit(LM_HEAD, {"eps": 1e-6}, logits=b.output("logits", "L", vocab), x=x, rows=rows, norm=norm, w=w)
    largest = {"T": most, "L": most}
    alone = CpuBackend(weights, CpuOptions(threads=1)).prepare(b.build(), {}, largest)
    made = [
        CpuBackend(weights, CpuOptions(threads=1 + m.rank % 2), m).prepare(b.build(), {}, largest)
        for m in memories(ranks)
    ]
    for count in (1, 3, most):
        inputs = {
            "x": rng.standard_normal((count, hidden)).astype(np.float32),
            "rows": rng.integers(0, count, count).astype(np.int32),
        }
        env = {"T": count, "L": count}
        want = alone.run(inputs, env)["logits"].copy()
        found: list[Array] = []

        def run(executor: CpuExecutor, inputs: Any = inputs, env: Any = env, found: Any = found) -> None:
            found.append(executor.run(inputs, env)["logits"])

        assert on_threads([partial(run, executor) for executor in made]) == [None] * ranks
        for logits in found:
            np.testing.assert_array_equal(logits, want)


def test_one_that_does_not_come_is_named() -> None:
    made = executors(memories(3, seconds=0.2))
    zeros = np.zeros((1, WIDTH), np.float32)
    calls = [partial(made[i][1].run, {"partial": zeros, "start": zeros.copy()}, {"T": 1}) for i in (0, 2)]
    errors = on_threads(calls)
    assert all(isinstance(error, PeerFailedError) for error in errors)
    assert str(errors[0]) == (
        "rank 1 of 3 does not answer; expected its part of a sum within 0.2 s; remedy: restart the server"
    )


def test_one_that_has_failed_ends_the_wait_of_the_others() -> None:
    of = memories(2)
    ((_, first), _) = executors(of)
    zeros = np.zeros((1, WIDTH), np.float32)
    threading.Timer(0.1, of[1].fail, [1]).start()
    with pytest.raises(PeerFailedError, match="rank 1 of 2 has failed"):
        first.run({"partial": zeros, "start": zeros}, {"T": 1})
    of[1].fail(0)  # the first failure is the cause, whatever follows from it
    with pytest.raises(PeerFailedError, match="rank 1 of 2 has failed"):
        of[0].check()


@pytest.mark.parametrize("ranks", [1, MAX_RANKS + 1])
def test_numbers_of_ranks_that_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"expected 2 to {MAX_RANKS}; got {ranks}"):
        RankMemory.create(ranks)


def test_memory_is_taken_where_it_is_written_alone() -> None:
    memory = RankMemory.create(4)
    assert os.fstat(memory.fd).st_size > 8 * SLOT_BYTES
    assert os.fstat(memory.fd).st_blocks * 512 < SLOT_BYTES // 100
    memory.close()
