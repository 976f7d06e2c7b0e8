"""What begins and ends a decode step on the device: its inputs, made from what lies there, and its draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.kernels.cuda.resident import CHANGES, DECODE_INPUTS, ResidentState
from pegainfer.runner.results import DrawnRing
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.gpu.harness import POISON, sized

Array = np.ndarray[Any, Any]
SLOTS, BLOCK = 40, 16
BLOCKS = sized(2_500, 300)  # of a sequence: SLOTS rows of them are more than one launch changes
WIDTH, TOKENS = BLOCKS * BLOCK, 200
GUARD = 3  # rows behind a tensor's own, which nobody may write
LARGEST = 2**27 - 1  # a block id: with BLOCK tokens in each, slots end just below 2**31


class Held:
    """A state on the device whose histories, tables and inputs were all ones (-1) before, and its mirror."""

    def __init__(self, ctx: CudaContext, rng: np.random.Generator) -> None:
        self.ctx = ctx
        self.state = s = ResidentState(ctx, SLOTS, WIDTH, BLOCKS, TOKENS, BLOCK)
        for t in (s.history, s.tables, s.token_ids, s.block_table, s.batch):
            ctx.stream.fill(t.address, POISON, t.nbytes)
        self.history = np.full((SLOTS, WIDTH), -1, np.int32)
        self.tables = np.full((SLOTS, BLOCKS), -1, np.int32)
        for slot in rng.permutation(SLOTS).tolist():
            length = int(rng.integers(1, WIDTH + 1)) if slot % 8 else WIDTH
            tokens = rng.integers(0, 2**31, length).astype(np.int32)
            s.enter(slot, tokens)
            self.history[slot, :length] = tokens

    def extend(self, rng: np.random.Generator, counts: list[int]) -> None:
        """Gives slot i its first counts[i] blocks, all slots' together and in no order."""
        places = [(slot, i) for slot, count in enumerate(counts) for i in range(count)]
        rng.shuffle(places)
        blocks = rng.integers(0, LARGEST + 1, len(places)).tolist()
        self.state.extend([s for s, _ in places], [i for _, i in places], blocks)
        for (slot, i), block in zip(places, blocks, strict=True):
            self.tables[slot, i] = block

    def read(self, t: DeviceTensor) -> Array:
        return t.numpy(self.ctx.stream)


@pytest.mark.parametrize("count", [1, 2, 63, BLOCKS])
def test_tables_and_histories_hold_what_was_told_and_nothing_else(count: int, ctx: CudaContext) -> None:
    rng = np.random.default_rng(count)
    held = Held(ctx, rng)
    counts = [count if slot in (3, SLOTS - 1) else 0 for slot in range(SLOTS)]
    if count == BLOCKS:
        counts = [count] * SLOTS
        assert sum(counts) > CHANGES
    held.extend(rng, counts)
    np.testing.assert_array_equal(held.read(held.state.tables), held.tables)
    np.testing.assert_array_equal(held.read(held.state.history), held.history)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 130), (SLOTS, TOKENS), (7, 0), (0, 0)])
def test_a_steps_rows_and_tokens_are_gathered(rows: int, tokens: int, ctx: CudaContext) -> None:
    rng = np.random.default_rng(rows)
    held = Held(ctx, rng)
    held.extend(rng, [BLOCKS - slot for slot in range(SLOTS)])
    slots = rng.permutation(SLOTS)[:rows]
    places = rng.integers(0, SLOTS * WIDTH, tokens)
    places[:2] = (SLOTS * WIDTH - 1, 0)[:tokens]
    held.state.gather(slots, places)
    np.testing.assert_array_equal(held.read(held.state.block_table)[:rows], held.tables[slots])
    np.testing.assert_array_equal(held.read(held.state.token_ids)[:tokens], held.history.reshape(-1)[places])


@pytest.mark.parametrize(("rows", "padded"), [(0, 1), (1, 1), (1, 8), (5, 8), (SLOTS, SLOTS)])
def test_decode_steps_make_their_own_inputs(rows: int, padded: int, ctx: CudaContext) -> None:
    """Rows at the first and at the last position of a block and of the history; three steps of the same."""
    steps = 3
    rng = np.random.default_rng(rows + padded)
    held = Held(ctx, rng)
    held.extend(rng, [BLOCKS] * SLOTS)
    slots = rng.permutation(SLOTS)[:rows]
    edges = np.array([0, WIDTH - steps, BLOCK - 1, BLOCK - steps, 128 * BLOCK, WIDTH // 2])
    positions = rng.integers(0, WIDTH - steps + 1, rows)
    positions[: len(edges)] = edges[:rows].clip(0, WIDTH - steps)
    logits = rng.permutation(rows)[: max(1, rows - 1)]  # one row may sample nothing
    held.state.enter_batch(slots, positions, logits)

    every = padded + GUARD
    outputs = {
        n: DeviceTensor.empty((every, BLOCKS) if n == "block_table" else (every,), "i32")
        for n in DECODE_INPUTS
    }
    started = rng.integers(0, 1000, (2, every)).astype(np.int32)
    counters = [DeviceTensor.from_numpy(a, "i32", ctx.stream) for a in started]
    launch = held.state.decode_inputs(padded, lambda n: outputs[n].address, [t.address for t in counters])
    drawn_by = np.zeros(rows, np.int32)
    drawn_by[: len(logits)] = logits[:rows]
    for step in range(steps):
        for t in outputs.values():
            ctx.stream.fill(t.address, POISON, t.nbytes)
        launch(ctx.stream)
        at = positions + step
        own = {
            "token_ids": held.history[slots, at], "positions": at, "query_starts": np.arange(rows),
            "query_lens": np.ones(rows), "context_lens": at + 1, "logit_rows": drawn_by,
            "slots": held.tables[slots, at // BLOCK] * BLOCK + at % BLOCK,
        }  # fmt: skip
        for name, values in own.items():
            want = np.full(every, -1, np.int32)  # as it was filled
            want[:padded] = -1 if name == "slots" else 0
            want[:rows] = values
            assert held.read(outputs[name]).tolist() == want.tolist(), f"{name} of step {step}"
        table = held.read(outputs["block_table"])
        for row, (slot, last) in enumerate(zip(slots, at // BLOCK, strict=True)):
            assert np.array_equal(table[row, : last + 1], held.tables[slot, : last + 1]), f"row {row}"
        assert (table[rows:] == -1).all()
        counted = started + (np.arange(every) < rows) * (step + 1)
        assert [held.read(t).tolist() for t in counters] == counted.tolist()


@pytest.mark.parametrize("rows", [1, 31, 256, 257, 600])
def test_draws_come_to_the_host_step_after_step(rows: int, ctx: CudaContext) -> None:
    """More steps than the ring has slots, from just below the count's end; only the step's own rows."""
    most = 600
    rng = np.random.default_rng(rows)
    state = ResidentState(ctx, SLOTS, WIDTH, BLOCKS, TOKENS, BLOCK)
    ring = DrawnRing(most)
    slots = ring.place[1]
    everywhere = {slot: ring.arrays(slot, most) for slot in range(slots)}
    last = np.array([2**32 - slots], np.uint32)
    ctx.stream.upload(state._ticket.address, last.ctypes.data, 4)
    ctx.stream.synchronize("ticket")
    for step in range(3 * slots):
        drawn = {n: rng.integers(-(2**31), 2**31, rows).astype(np.int32) for n in ("tokens", "status")}
        held = {n: DeviceTensor.from_numpy(a, "i32", ctx.stream) for n, a in drawn.items()}
        state.publish(held["tokens"].address, held["status"].address, rows, ring.place)(ctx.stream)
        ctx.stream.synchronize("publish")
        slot = ring.take()
        for name, values in drawn.items():
            everywhere[slot][name][:rows] = values
        for at, want in everywhere.items():
            for name in drawn:
                assert np.array_equal(ring.arrays(at, most)[name], want[name]), f"step {step}, slot {at}"
