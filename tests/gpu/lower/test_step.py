"""What begins and ends a decode step on the device: its inputs, made from what lies there, and its draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.contract.step import KVSpec, PageGroup, RunnerInfo, StateGroup
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runner.resident import CHANGES, ROW_INPUTS, ResidentState
from pegainfer.runner.results import DrawnRing
from pegainfer.runner.staging import StateSave
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.gpu.harness import POISON, sized

Array = np.ndarray[Any, Any]
SLOTS, BLOCK = 40, 16
BLOCKS = sized(2_500, 300)  # of a sequence: SLOTS rows of them are more than one launch changes
LENGTH, TOKENS = BLOCKS * BLOCK - 1, 200
WIDTH = LENGTH + 1
GUARD = 3  # rows behind a tensor's own, which nobody may write
KV = PageGroup(name="kv", block_size=BLOCK, bytes_per_block=1)
# Tables of widths that are no multiple of four, blocks of other sizes, states between pages.
SPECS = {
    "pages": (KV,),
    "all": (
        StateGroup(name="conv", bytes_per_state=1),
        KV,
        PageGroup(name="coarse", block_size=128, bytes_per_block=1),
        StateGroup(name="delta", bytes_per_state=1),
        PageGroup(name="odd", block_size=48, bytes_per_block=1, window=96),
    ),
}
Groups = tuple[PageGroup | StateGroup, ...]


def names_of(groups: Groups) -> set[str]:
    """All inputs of a forward pass with these groups."""
    pages = {f"{g.name}.{n}" for g in groups if isinstance(g, PageGroup) for n in ("places", "block_table")}
    states = {
        f"{g.name}.{n}" for g in groups if isinstance(g, StateGroup) for n in ("state_ids", "state_saves")
    }
    return {*ROW_INPUTS} | pages | states


def resident(ctx: CudaContext, groups: Groups) -> ResidentState:
    info = RunnerInfo(
        kv=KVSpec(groups), num_blocks=tuple(map(most_blocks, groups)), max_slots=SLOTS, max_tokens=TOKENS,
        max_model_len=LENGTH, vocab_size=2**31 - 1,
    )  # fmt: skip
    return ResidentState(ctx.stream, ctx.library.kernel, info, names_of(groups), ctx.device.info.pdl)


def blocks_of(group: PageGroup | StateGroup) -> int:
    """Entries of a sequence's table."""
    return -(-LENGTH // group.block_size) if isinstance(group, PageGroup) else 1


def most_blocks(group: PageGroup | StateGroup) -> int:
    """So many that places end just below 2**31."""
    return 2**31 // group.block_size if isinstance(group, PageGroup) else 2**31 - 1


class Held:
    """A state on the device whose histories, tables and inputs were all ones (-1) before, and its mirror."""

    def __init__(self, ctx: CudaContext, rng: np.random.Generator, groups: Groups = (KV,)) -> None:
        self.ctx = ctx
        self.groups = groups
        self.state = s = resident(ctx, groups)
        for t in (s.history, s.tables, *s.bound.values(), s.batch):
            ctx.stream.fill(t.address, POISON, t.nbytes)
        self.history = np.full((SLOTS, WIDTH), -1, np.int32)
        self.tables = {g.name: np.full((SLOTS, blocks_of(g)), -1, np.int32) for g in groups}
        for slot in rng.permutation(SLOTS).tolist():
            length = int(rng.integers(1, WIDTH + 1)) if slot % 8 else WIDTH
            tokens = rng.integers(0, 2**31, length).astype(np.int32)
            s.enter(slot, tokens)
            self.history[slot, :length] = tokens

    def extend(self, rng: np.random.Generator, counts: list[int]) -> None:
        """Gives slot i the blocks of its first counts[i] · BLOCK tokens in all groups, and its states."""
        entries = []
        for group, columns in zip(self.groups, self.state._groups, strict=True):
            for slot, count in enumerate(counts):
                most = -(-count * BLOCK // group.block_size) if isinstance(group, PageGroup) else count
                most = min(most, blocks_of(group))
                entries += [(slot, columns.first + i, group, i) for i in range(most)]
        entries = [entries[i] for i in rng.permutation(len(entries))]
        blocks = [int(rng.integers(0, most_blocks(group))) for _, _, group, _ in entries]
        self.state.extend([e[0] for e in entries], [e[1] for e in entries], blocks)
        for (slot, _, group, i), block in zip(entries, blocks, strict=True):
            self.tables[group.name][slot, i] = block

    def read_tables(self) -> dict[str, Array]:
        table = self.read(self.state.tables)
        return {
            g.name: table[:, c.first : c.first + c.width]
            for g, c in zip(self.groups, self.state._groups, strict=True)
        }

    def read(self, t: DeviceTensor) -> Array:
        return t.numpy(self.ctx.stream)


@pytest.mark.parametrize("groups", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("count", [1, 2, 63, BLOCKS])
def test_tables_and_histories_hold_what_was_sent_and_nothing_else(
    count: int, groups: Groups, ctx: CudaContext
) -> None:
    rng = np.random.default_rng(count)
    held = Held(ctx, rng, groups)
    counts = [count if slot in (3, SLOTS - 1) else 0 for slot in range(SLOTS)]
    if count == BLOCKS:
        counts = [count] * SLOTS
        assert sum(counts) > CHANGES
    held.extend(rng, counts)
    for name, table in held.read_tables().items():
        np.testing.assert_array_equal(table, held.tables[name], err_msg=name)
    np.testing.assert_array_equal(held.read(held.state.history), held.history)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 130), (SLOTS, TOKENS), (7, 0), (0, 0)])
@pytest.mark.parametrize("groups", SPECS.values(), ids=SPECS)
def test_a_steps_rows_and_tokens_are_gathered(
    groups: Groups, rows: int, tokens: int, ctx: CudaContext
) -> None:
    rng = np.random.default_rng(rows)
    held = Held(ctx, rng, groups)
    held.extend(rng, [BLOCKS - slot for slot in range(SLOTS)])
    slots = rng.permutation(SLOTS)[:rows]
    places = rng.integers(0, SLOTS * WIDTH, tokens)
    places[:2] = (SLOTS * WIDTH - 1, 0)[:tokens]
    held.state.gather(slots, places)
    bound = held.state.bound
    assert bound.keys() == {
        "token_ids",
        *(f"{g.name}.block_table" for g in groups if isinstance(g, PageGroup)),
    }
    for g in groups:
        if isinstance(g, PageGroup):
            table = held.read(bound[f"{g.name}.block_table"])
            np.testing.assert_array_equal(table[:rows], held.tables[g.name][slots], err_msg=g.name)
    np.testing.assert_array_equal(held.read(bound["token_ids"])[:tokens], held.history.reshape(-1)[places])


@pytest.mark.parametrize("groups", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("rows", "padded"), [(0, 1), (1, 1), (1, 8), (5, 8), (SLOTS, SLOTS)])
def test_decode_steps_make_their_own_inputs(rows: int, padded: int, groups: Groups, ctx: CudaContext) -> None:
    """Rows at the first and at the last position of a block and of the history; three steps of the same rows,
    of which the first alone saves states."""
    steps = 3
    rng = np.random.default_rng(rows + padded)
    held = Held(ctx, rng, groups)
    held.extend(rng, [BLOCKS] * SLOTS)
    slots = rng.permutation(SLOTS)[:rows]
    edges = np.array([0, LENGTH - steps, BLOCK - 1, BLOCK - steps, 128 * BLOCK, LENGTH // 2])
    positions = rng.integers(0, LENGTH - steps + 1, rows)
    positions[: len(edges)] = edges[:rows].clip(0, LENGTH - steps)
    logits = rng.permutation(rows)[: max(1, rows - 1)]  # one row may sample nothing
    states = [i for i, g in enumerate(groups) if isinstance(g, StateGroup)]
    saved = {
        (g, row): int(rng.integers(0, 2**31)) for g in states for row in range(rows) if (g + row) % 3 == 0
    }
    saves = [StateSave(g, row, row, state) for (g, row), state in saved.items()]
    held.state.enter_batch(slots, positions, logits, saves)

    every = padded + GUARD
    widths = {f"{g.name}.block_table": blocks_of(g) for g in groups if isinstance(g, PageGroup)}
    outputs = {
        n: DeviceTensor.empty((every, widths[n]) if n in widths else (every,), "i32")
        for n in names_of(groups)
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
        }  # fmt: skip
        for i, g in enumerate(groups):
            table = held.tables[g.name][slots]
            if isinstance(g, PageGroup):
                blocks = table[np.arange(rows), at // g.block_size]
                own[f"{g.name}.places"] = blocks * g.block_size + at % g.block_size
            else:
                own[f"{g.name}.state_ids"] = table[:, 0]
                own[f"{g.name}.state_saves"] = [
                    saved.get((i, row), -1) if step == 0 else -1 for row in range(rows)
                ]
        for name, values in own.items():
            want = np.full(every, -1, np.int32)  # as it was filled
            want[:padded] = -1 if "." in name else 0
            want[:rows] = values
            assert held.read(outputs[name]).tolist() == want.tolist(), f"{name} of step {step}"
        for g in groups:
            if not isinstance(g, PageGroup):
                continue
            table = held.read(outputs[f"{g.name}.block_table"])
            for row, (slot, last) in enumerate(zip(slots, at // g.block_size, strict=True)):
                want = held.tables[g.name][slot, : last + 1]
                assert np.array_equal(table[row, : last + 1], want), f"{g.name}, row {row}"
            assert (table[rows:] == -1).all()
        counted = started + (np.arange(every) < rows) * (step + 1)
        assert [held.read(t).tolist() for t in counters] == counted.tolist()


def test_inputs_that_the_program_lacks_are_not_made(ctx: CudaContext) -> None:
    state = resident(ctx, SPECS["all"])
    state._inputs = {"token_ids", "delta.state_ids"}
    state.enter_batch(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))
    outputs = {n: DeviceTensor.empty((2,), "i32") for n in ("token_ids", "delta.state_ids", "lens", "draws")}
    for t in outputs.values():
        ctx.stream.fill(t.address, 0, t.nbytes)
    counters = [outputs["lens"].address, outputs["draws"].address]
    state.decode_inputs(2, lambda n: outputs[n].address, counters)(ctx.stream)
    read = {n: t.numpy(ctx.stream).tolist() for n, t in outputs.items()}
    assert read == {"token_ids": [0, 0], "delta.state_ids": [-1, -1], "lens": [0, 0], "draws": [0, 0]}


@pytest.mark.parametrize("rows", [1, 31, 256, 257, 600])
def test_draws_come_to_the_host_step_after_step(rows: int, ctx: CudaContext) -> None:
    """More steps than the ring has slots, from just below the count's end; only the step's own rows."""
    most = 600
    rng = np.random.default_rng(rows)
    state = resident(ctx, (KV,))
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
