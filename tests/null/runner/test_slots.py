"""Plans' deltas on resident state, and the arrays staged from a plan's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from pegainfer.contract.errors import InvariantError, UnsupportedError
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import (
    NO_BLOCK,
    BlockCopy,
    KVSpec,
    NewSlot,
    PageGroup,
    Row,
    RunnerInfo,
    SlotBlocks,
    StateGroup,
    StateSnapshot,
    StepPlan,
)
from pegainfer.contract.tiers import DEVICE, Transfer
from pegainfer.runner.slots import Slots
from pegainfer.runner.staging import StagedRows, Staging

OWN = ("places", "block_table", "state_ids", "state_saves")  # inputs of a group
INPUTS = ("token_ids", "positions", "query_starts", "query_lens", "context_lens", "logit_rows")
PAGES = PageGroup(name="kv", block_size=4, bytes_per_block=1)
COARSE = PageGroup(name="coarse", block_size=8, bytes_per_block=1)
STATE = StateGroup(name="state", bytes_per_state=1)
OTHER = StateGroup(name="other", bytes_per_state=1)


def info(*groups: PageGroup | StateGroup) -> RunnerInfo:
    return RunnerInfo(
        kv=KVSpec(groups),
        num_blocks=(64,) * len(groups),
        max_slots=4,
        max_tokens=16,
        max_model_len=30,
        vocab_size=1000,
    )


def new(slot: int, tokens: list[int], num_prompt: int | None = None, **sampling: Any) -> NewSlot:
    params = SamplingParams(**sampling)
    return NewSlot(
        slot=slot,
        seq=7,
        tokens=pack_tokens(tokens),
        num_prompt=num_prompt or len(tokens),
        sampling=params,
        seed=5,
    )


class Bench:
    """Slots and staging with a step counter."""

    def __init__(self, *groups: PageGroup | StateGroup) -> None:
        self.info = info(*(groups or (PAGES,)))
        self.slots = Slots(self.info, max_logprobs=5)
        inputs = {f"{g.name}.{name}" for g in self.info.kv.groups for name in OWN}
        self.staging = Staging(self.slots, self.info, inputs | set(INPUTS))
        self.step = 0

    def run(self, **parts: Any) -> StagedRows:
        self.step += 1
        plan = StepPlan(step=self.step, **parts)
        self.slots.apply(plan)
        self.rows = self.staging.rows(plan)
        return self.rows

    def inputs(self) -> dict[str, Any]:
        """Of the last step."""
        return {name: a.tolist() for name, a in self.staging.inputs(self.rows).items()}


def test_a_prefill_and_a_decode_share_a_step() -> None:
    bench = Bench()
    bench.run(
        news=(new(2, [10, 11, 12]), new(0, [20, 21, 22, 23, 24, 25])),
        blocks=(SlotBlocks(2, 0, (9,)), SlotBlocks(0, 0, (5, 3))),
        rows=(Row(2, 0, 3, True),),
    )
    bench.slots.history[2, 3] = 13
    bench.slots.advance(np.array([2]))
    rows = bench.run(rows=(Row(0, 1, 4, False), Row(2, 3, 1, True)))
    assert bench.inputs() == {
        "token_ids": [21, 22, 23, 24, 13],
        "positions": [1, 2, 3, 4, 3],
        "kv.places": [5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 3 * 4, 9 * 4 + 3],
        "query_starts": [0, 4],
        "query_lens": [4, 1],
        "context_lens": [5, 4],
        "logit_rows": [4],
        "kv.block_table": [[5, 3, 0, 0, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0, 0, 0]],
    }
    assert rows.sampling.tolist() == [1]
    # Row 0 reads 5 cached tokens for pairs 2 + 3 + 4 + 5, row 1 reads 4 for 4.
    assert rows.env == {"T": 5, "R": 2, "L": 1, "C": 9, "Q": 18}
    assert all(a.dtype == np.int32 for a in bench.staging.inputs(rows).values())


def test_a_following_row_starts_at_the_last_known_token() -> None:
    bench = Bench()
    bench.run(news=(new(1, [1, 2]),), blocks=(SlotBlocks(1, 0, (4,)),), rows=(Row(1, 0, 2, True),))
    bench.slots.history[1, 2] = 3
    bench.slots.advance(np.array([1]))
    bench.run(rows=(Row(1, 2, 1, True, True),))
    assert bench.inputs()["token_ids"] == [3]
    # Nothing was drawn for it since (its draw failed): the same token is computed again at its own place.
    rows = bench.run(rows=(Row(1, 3, 1, True, True),))
    assert bench.inputs()["positions"] == [2] == rows.starts.tolist()
    assert rows.starts.tolist() == [2]


def test_blocks_are_appended_and_a_slot_begins_anew() -> None:
    bench = Bench()
    bench.run(news=(new(3, [1] * 9),), blocks=(SlotBlocks(3, 0, (1, 2)), SlotBlocks(3, 0, (8,))))
    assert bench.slots.tables[0][3, :3].tolist() == [1, 2, 8]
    bench.run(frees=(3,), news=(new(3, [5, 6], num_prompt=1),), blocks=(SlotBlocks(3, 0, (6,)),))
    assert bench.slots.tables[0][3, 0] == 6
    assert (bench.slots.known[3], bench.slots.num_prompt[3]) == (2, 1)


def test_groups_have_tables_of_their_own_and_states_one_entry() -> None:
    bench = Bench(PAGES, STATE, COARSE)
    bench.run(
        news=(new(0, list(range(10))),),
        blocks=(SlotBlocks(0, 0, (1, 2, 3)), SlotBlocks(0, 1, (7,)), SlotBlocks(0, 2, (9, 4))),
        rows=(Row(0, 6, 4, True),),
    )
    staged = bench.inputs()
    assert staged["kv.places"] == [10, 11, 12, 13]
    assert staged["coarse.places"] == [78, 79, 32, 33]
    assert staged["coarse.block_table"] == [[9, 4, 0, 0]]
    assert (staged["state.state_ids"], staged["state.state_saves"]) == ([7], [-1] * 4)
    assert set(staged) == {
        *INPUTS, "kv.places", "kv.block_table", "coarse.places", "coarse.block_table", "state.state_ids",
        "state.state_saves",
    }  # fmt: skip
    bench.run(blocks=(SlotBlocks(0, 1, (8,)),))
    assert bench.slots.tables[1][0].tolist() == [8]


def test_a_program_gets_the_inputs_that_it_has() -> None:
    slots = Slots(info(PAGES, STATE), max_logprobs=0)
    staging = Staging(slots, info(PAGES, STATE), {"token_ids", "state.state_ids"})
    plan = StepPlan(
        step=1, news=(new(0, [4, 5]),), blocks=(SlotBlocks(0, 0, (1,)), SlotBlocks(0, 1, (9,))),
        rows=(Row(0, 0, 2, True),),
    )  # fmt: skip
    slots.apply(plan)
    staged = {name: a.tolist() for name, a in staging.inputs(staging.rows(plan)).items()}
    assert staged == {"token_ids": [4, 5], "state.state_ids": [9]}


def test_snapshots_become_states_that_tokens_save() -> None:
    """Two in one row and one in another, for two groups; a step without snapshots saves nothing."""
    bench = Bench(PAGES, STATE, OTHER)
    blocks = [SlotBlocks(s, 0, (3 * s, 3 * s + 1, 3 * s + 2)) for s in (1, 2)]
    states = [SlotBlocks(s, g, (10 * g + s,)) for s in (1, 2) for g in (1, 2)]
    bench.run(
        news=(new(1, list(range(10))), new(2, list(range(9)))), blocks=(*blocks, *states),
        rows=(Row(2, 0, 3, False),),
    )  # fmt: skip
    assert bench.inputs()["state.state_saves"] == [-1] * 3
    snapshots = (
        StateSnapshot(1, 1, 4, 33), StateSnapshot(1, 1, 8, 34), StateSnapshot(2, 1, 8, 35),
        StateSnapshot(2, 2, 8, 36),
    )  # fmt: skip
    bench.run(rows=(Row(2, 3, 6, True), Row(1, 0, 8, False)), snapshots=snapshots)
    staged = bench.inputs()
    # Row of slot 2: positions 3 to 8, so position 7 is its token 4; row of slot 1: tokens 6 to 13.
    assert staged["state.state_saves"] == [-1, -1, -1, -1, 35, -1, -1, -1, -1, 33, -1, -1, -1, 34]
    assert staged["other.state_saves"] == [-1] * 4 + [36] + [-1] * 9
    assert (staged["state.state_ids"], staged["other.state_ids"]) == ([12, 11], [22, 21])
    bench.slots.history[2, 9] = 5
    bench.slots.advance(np.array([2]))
    bench.run(rows=(Row(2, 9, 1, True), Row(1, 8, 1, False)))
    assert bench.inputs()["state.state_saves"] == [-1, -1]


def test_a_snapshot_that_a_failed_draw_moves_out_of_its_row_is_not_taken() -> None:
    bench = Bench(PAGES, STATE)
    blocks = (SlotBlocks(0, 0, (0, 1)), SlotBlocks(0, 1, (4,)))
    bench.run(news=(new(0, list(range(7))),), blocks=blocks, rows=(Row(0, 0, 7, True),))
    rows = bench.run(rows=(Row(0, 7, 1, True, True),), snapshots=(StateSnapshot(0, 1, 8, 9),))
    assert rows.starts.tolist() == [6] and bench.inputs()["state.state_saves"] == [-1]


def test_a_snapshot_that_an_earlier_row_has_passed_is_not_taken_again() -> None:
    bench = Bench(PAGES, STATE)
    blocks = (SlotBlocks(0, 0, (0, 1)), SlotBlocks(0, 1, (4,)))
    bench.run(news=(new(0, list(range(8))),), blocks=blocks, rows=(Row(0, 0, 4, False),))
    bench.run(rows=(Row(0, 4, 2, False),), snapshots=(StateSnapshot(0, 1, 4, 9),))
    assert bench.inputs()["state.state_saves"] == [-1, -1]


def test_a_windows_table_may_begin_with_blocks_that_are_not_there() -> None:
    window = PageGroup(name="near", block_size=4, bytes_per_block=1, window=4)
    bench = Bench(window)
    bench.run(news=(new(0, list(range(10))),), blocks=(SlotBlocks(0, 0, (NO_BLOCK, 8, 9)),))
    bench.run(rows=(Row(0, 8, 2, True),))
    assert bench.inputs()["near.places"] == [36, 37]
    with pytest.raises(InvariantError, match="names blocks"):
        bench.run(blocks=(SlotBlocks(0, 0, (64,)),))


def test_an_empty_plan_stages_nothing() -> None:
    rows = Bench().run()
    assert rows.env == {"T": 0, "R": 0, "L": 0, "C": 0, "Q": 0}


@pytest.mark.parametrize(
    "plan",
    [
        lambda b: b.run(frees=(0,)),
        lambda b: b.run(news=(new(1, [1]),)),  # taken
        lambda b: b.run(news=(new(0, [1] * 31),)),  # longer than the history
        lambda b: b.run(news=(new(0, [1000]),)),  # outside the vocabulary
        lambda b: b.run(news=(new(0, [-1]),)),
        lambda b: b.run(blocks=(SlotBlocks(1, 0, tuple(range(8))),)),  # one block is there already
        lambda b: b.run(blocks=(SlotBlocks(1, 0, (64,)),)),  # outside the pool
        lambda b: b.run(blocks=(SlotBlocks(1, 0, (5, -1)),)),
        lambda b: b.run(copies=(BlockCopy(0, 3, 64),)),
        lambda b: b.run(rows=(Row(1, 0, 3, True),), snapshots=(StateSnapshot(1, 0, 3, 3),)),  # pages
        lambda b: b.run(copies=(BlockCopy(0, -1, 3),)),
        lambda b: b.run(rows=(Row(1, 0, 4, False),)),  # three tokens are known
        lambda b: b.run(rows=(Row(1, 0, 0, False),)),
        lambda b: b.run(rows=(Row(1, -1, 2, False),)),
        lambda b: b.run(rows=(Row(1, 0, 3, False),) * 6),  # 18 tokens of 16
    ],
)
def test_impossible_plans_are_refused(plan: Callable[[Bench], Any]) -> None:
    bench = Bench()
    bench.run(news=(new(1, [1, 2, 3]),), blocks=(SlotBlocks(1, 0, (0,)),))
    with pytest.raises(InvariantError):
        plan(bench)


@pytest.mark.parametrize(
    "snapshot",
    [
        StateSnapshot(1, 1, 1, 64),  # outside the pool
        StateSnapshot(1, 1, 1, -1),
        StateSnapshot(0, 1, 1, 3),  # a slot without a row
        StateSnapshot(1, 1, 4, 3),  # behind the row
    ],
)
def test_impossible_snapshots_are_refused(snapshot: StateSnapshot) -> None:
    bench = Bench(PAGES, STATE)
    blocks = (SlotBlocks(1, 0, (0,)), SlotBlocks(1, 1, (5,)))
    bench.run(news=(new(1, [1, 2, 3, 4]),), blocks=blocks, rows=(Row(1, 0, 1, False),))
    with pytest.raises(InvariantError):
        bench.run(rows=(Row(1, 1, 2, False),), snapshots=(snapshot,))


def test_rows_that_go_on_are_those_of_a_later_plan() -> None:
    bench = Bench()
    news = (new(0, [1, 2]), new(1, [3, 4]))
    blocks = (SlotBlocks(0, 0, (4,)), SlotBlocks(1, 0, (5,)))
    bench.run(news=news, blocks=blocks, rows=(Row(0, 0, 2, True), Row(1, 0, 2, True)))
    bench.slots.advance(np.array([0, 1]))
    first = bench.run(rows=tuple(Row(s, 2, 1, True, True) for s in (0, 1)))
    bench.slots.advance(np.array([0, 1]), 2)
    staged, advanced = bench.run(rows=tuple(Row(s, 4, 1, True, True) for s in (0, 1))), first.advanced(2)
    assert first.decode and advanced.env == staged.env
    for name in ("slots", "starts", "counts", "sampling"):
        assert getattr(advanced, name).tolist() == getattr(staged, name).tolist()


@pytest.mark.parametrize("transfer", [Transfer(1, 0, DEVICE, 64, 1, 0), Transfer(1, 0, 1, 0, DEVICE, -1)])
def test_transfers_name_blocks_of_the_pool(transfer: Transfer) -> None:
    with pytest.raises(InvariantError, match="names blocks"):
        Bench().run(transfers=(transfer,))
    Bench().run(transfers=(Transfer(1, 0, DEVICE, 63, 1, 900),))


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("max_commit", {"max_commit": 2}),
        ("data_ranks", {"data_ranks": 2}),
    ],
)
def test_slots_refuse_what_the_runner_lacks(feature: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=feature):
        Slots(msgspec.structs.replace(info(PAGES), **changes), 4)
