"""A group of ranks as one runner: plans are broadcast, and ranks that disagree end the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pegainfer.app.ranks import null_ranks
from pegainfer.contract.adapter import AdapterRunner
from pegainfer.contract.errors import (
    ConfigError,
    EngineDeadError,
    InvariantError,
    ModelFileError,
    PeerFailedError,
    PegaError,
)
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import (
    BlockCopy,
    NewSlot,
    Preparing,
    Row,
    Runner,
    RunnerInfo,
    SlotBlocks,
    StateSnapshot,
    StepPlan,
    StepResult,
)
from pegainfer.contract.tiers import Tier, Transfer
from pegainfer.parallel.group import RankGroup
from pegainfer.parallel.part import DataRank, part_of, rows_of
from tests.null.engine.harness import null_config

INFO = null_config().runner_info()  # 4 slots


class Scripted:
    """A rank that gives what it is told to, and keeps what it got."""

    def __init__(self, *results: StepResult | Exception, **info: Any) -> None:
        self.info: RunnerInfo = msgspec.structs.replace(INFO, **info)
        self.results = list(results)
        self.plans: list[StepPlan] = []
        self.masks: list[dict[int, bytes] | None] = []
        self.adapters: dict[int, str] = {}
        self.refuses = False
        self.left_to_prepare = 0
        self.closed = False

    def forward(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        return plan

    def sample(self, handle: StepPlan, masks: dict[int, bytes] | None = None) -> Scripted:
        self.masks.append(masks)
        return self

    def done(self) -> bool:
        return not isinstance(self.results[0], Exception)

    def wait(self) -> StepResult:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def prepare(self) -> bool:
        self.left_to_prepare -= 1
        return self.left_to_prepare > 0

    def read_adapter(self, name: str, path: str) -> tuple[Any, str]:
        return name if path else id(self), path

    def install_adapter(self, index: int, adapter: str) -> None:
        if self.refuses:
            raise ModelFileError("no room")
        self.adapters[index] = adapter

    def remove_adapter(self, index: int) -> None:
        del self.adapters[index]

    def close(self) -> None:
        self.closed = True
        if self.refuses:
            raise OSError("cannot close")


def result(*tokens: int, step: int = 1, **fields: Any) -> StepResult:
    return StepResult(step=step, tokens=tuple((token,) for token in tokens), **fields)


def plan(*slots: int, **fields: Any) -> StepPlan:
    return StepPlan(step=1, rows=tuple(Row(slot, 0, 1, True) for slot in slots), **fields)


def run(group: RankGroup, what: StepPlan) -> StepResult:
    return group.sample(group.forward(what)).wait()


# Tensor-parallel ranks


def test_every_rank_gets_the_same_plan_and_masks() -> None:
    ranks = [Scripted(result(7, 8)) for _ in range(3)]
    group, what, masks = RankGroup(ranks), plan(0, 2), {1: b"mask"}
    assert group.sample(group.forward(what), masks).wait().tokens == ((7,), (8,))
    assert all(rank.plans[0] is what and rank.masks == [masks] for rank in ranks)


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [Scripted(result(7, seconds=0.1, stage_seconds=0.02)), Scripted(result(7, seconds=0.3))]
    got = run(RankGroup(ranks), plan(0))
    assert (got.seconds, got.stage_seconds) == (0.3, 0.02)


def test_the_time_of_each_rank_adds_up() -> None:
    first = Scripted(result(7, seconds=2.0), result(7, seconds=1.0))
    group = RankGroup([first, Scripted(result(7, seconds=0.5), result(7, seconds=4.0))])
    assert group.rank_seconds() == (0.0, 0.0)
    for _ in range(2):
        run(group, plan(0))
    assert group.rank_seconds() == (3.0, 4.5)


def test_a_step_is_done_when_every_rank_has_done_it() -> None:
    ranks = [Scripted(result(7)), Scripted(ValueError())]
    group = RankGroup(ranks)
    pending = group.sample(group.forward(plan(0)))
    assert not pending.done()
    ranks[1].results = [result(7)]
    assert pending.done()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            result(7, 9),
            r"disagree on tokens; expected rank 0's \(8,\); got rank 1's \(9,\); at step 1, row 1",
        ),
        (result(7), r"on tokens; expected rank 0's \(\(7,\), \(8,\)\); got rank 1's \(\(7,\),\); at step 1;"),
        (result(7, 8, step=2), "on step; expected rank 0's 1; got rank 1's 2"),
        (
            result(7, 8, errors={1: "NaN"}),
            "on errors; expected rank 0's None; got rank 1's 'NaN'; at step 1, row 1",
        ),
        (result(7, 8, pooled={0: b"x"}), "on pooled; .*row 0"),
    ],
)
def test_ranks_that_disagree_end_the_engine_and_say_where(other: StepResult, message: str) -> None:
    with pytest.raises(EngineDeadError, match=message):
        run(RankGroup([Scripted(result(7, 8)), Scripted(other)]), plan(0, 1))


def test_a_step_that_fails_everywhere_has_failed() -> None:
    group = RankGroup([Scripted(ValueError("first"), result(7)), Scripted(ValueError("second"), result(7))])
    with pytest.raises(ValueError, match="first"):
        run(group, plan(0))
    assert run(group, plan(0)).tokens == ((7,),)


def test_a_step_that_fails_on_one_rank_alone_ends_the_engine() -> None:
    with pytest.raises(
        EngineDeadError, match="rank 1 failed where others did not: ValueError: lost; at step 1"
    ):
        run(RankGroup([Scripted(result(7)), Scripted(ValueError("lost"))]), plan(0))


def test_the_rank_that_failed_is_named_rather_than_those_that_noticed() -> None:
    noticed = PeerFailedError("rank 1 of 3 has failed")
    for cause, message in (
        (EngineDeadError("rank 1 has ended"), "rank 1 has ended"),
        (ValueError("lost"), "rank 1 failed where others did not: ValueError: lost"),
    ):
        failed: list[int] = []
        ranks = [Scripted(noticed), Scripted(cause), Scripted(noticed)]
        with pytest.raises(EngineDeadError, match=message):
            run(RankGroup(ranks, failed.append), plan(0))
        assert failed == [0, 1, 2]  # called for each at once, so that the next is not waited for in vain
    with pytest.raises(PeerFailedError, match="rank 1 of 3 has failed"):
        run(RankGroup([Scripted(noticed), Scripted(noticed)]), plan(0))


def test_a_broken_invariant_is_not_hidden_by_an_ordinary_failure() -> None:
    with pytest.raises(InvariantError, match="ours"):
        run(RankGroup([Scripted(ValueError()), Scripted(InvariantError("ours"))]), plan(0))


# Bounds


def test_pools_are_as_large_as_the_smallest_rank_has_them() -> None:
    host = [(Tier(kind="host", num_blocks=(n,)),) for n in (9, 5)]
    group = RankGroup([Scripted(num_blocks=(30,), tiers=host[0]), Scripted(num_blocks=(40,), tiers=host[1])])
    assert (group.info.num_blocks, group.info.tiers[0].num_blocks) == ((30,), (5,))


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([{}, {"max_tokens": 99}], "differ in max_tokens; expected rank 0's 16; got rank 1's 99"),
        ([{}, {"tiers": (Tier(kind="disk", num_blocks=(3,)),)}], "differ in tiers"),
        ([{"data_ranks": 2}], "expected multiples of 2; got 1 ranks and 4 slots"),
        ([{"data_ranks": 3}] * 3, "expected multiples of 3; got 3 ranks and 4 slots"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(infos: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RankGroup([Scripted(**info) for info in infos])


# Transfers


def move(id: int, rank: int = 0) -> Transfer:
    return Transfer(id, 0, 1, 0, 0, id, rank)


def test_a_transfer_has_landed_when_the_last_rank_says_so() -> None:
    group = RankGroup(
        [
            Scripted(result(landed=(1,)), result(landed=(2,))),
            Scripted(result(), result(landed=(2, 1))),
        ]
    )
    first = plan(transfers=(move(1), move(2)))
    assert run(group, first).landed == ()
    assert sorted(run(group, plan()).landed) == [1, 2]


def test_a_transfer_that_failed_on_one_rank_has_failed_once_all_have_ended_it() -> None:
    ranks = [Scripted(result(failed={1: "disk full"}), result()), Scripted(result(), result(landed=(1,)))]
    group = RankGroup(ranks)
    got = run(group, plan(transfers=(move(1),)))
    assert (got.landed, got.failed) == ((), {})  # rank 1 still writes to the target
    got = run(group, plan())
    assert (got.landed, got.failed) == ((), {1: "rank 0: disk full"})


def test_only_the_ranks_with_its_pools_take_part_in_a_transfer() -> None:
    ranks = [Scripted(result(landed=done), data_ranks=2) for done in ((), (), (5,), (5,))]
    assert run(RankGroup(ranks), plan(transfers=(move(5, rank=1),))).landed == (5,)


def test_a_rank_that_ends_a_transfer_of_others_ends_the_engine() -> None:
    ranks = [Scripted(result(landed=done), data_ranks=2) for done in ((5,), ())]
    with pytest.raises(
        EngineDeadError, match="rank 0 has ended transfer 5, which it was not doing; at step 1"
    ):
        run(RankGroup(ranks), plan(transfers=(move(5, rank=1),)))


# Data-parallel ranks


def test_results_are_put_together_by_row() -> None:
    ranks = [
        Scripted(result(7, 8, errors={1: "bad"}), data_ranks=2),
        Scripted(result(9, pooled={0: b"p"}, error_kinds={}), data_ranks=2),
    ]
    got = run(RankGroup(ranks), plan(1, 3, 0))  # slots 0 and 1 live on rank 0
    assert got.tokens == ((7,), (9,), (8,))
    assert (got.errors, got.pooled) == ({2: "bad"}, {1: b"p"})


def test_a_result_of_other_rows_ends_the_engine() -> None:
    ranks = [Scripted(result(7), data_ranks=2), Scripted(result(), data_ranks=2)]
    with pytest.raises(EngineDeadError, match=r"expected 1 rows of step 1; got 0 of step 1; at rank 1"):
        run(RankGroup(ranks), plan(0, 2))


def test_a_rank_gets_its_part_with_its_own_slot_numbers() -> None:
    info = msgspec.structs.replace(INFO, data_ranks=2)
    sampling = SamplingParams()

    def new(slot: int) -> NewSlot:
        return NewSlot(slot=slot, seq=slot, tokens=pack_tokens([1]), num_prompt=1, sampling=sampling, seed=0)

    whole = StepPlan(
        step=4,
        frees=(0, 3),
        news=(new(3), new(1)),
        blocks=(SlotBlocks(3, 0, (5,)), SlotBlocks(1, 0, (5,))),
        copies=(BlockCopy(0, 1, 2, 1), BlockCopy(0, 3, 4, 0)),
        transfers=(move(1, 0), move(2, 1)),
        rows=(Row(2, 0, 3, True, drafts=2), Row(1, 0, 1, True), Row(3, 0, 1, False)),
        snapshots=(StateSnapshot(1, 0, 4, 7), StateSnapshot(2, 0, 4, 7)),
    )
    rows = rows_of(whole, info, 1)
    assert rows == [0, 2]
    assert part_of(whole, info, 1, rows) == StepPlan(
        step=4,
        frees=(1,),
        news=(msgspec.structs.replace(new(3), slot=1),),
        blocks=(SlotBlocks(1, 0, (5,)),),
        copies=(BlockCopy(0, 1, 2, 1),),
        transfers=(move(2, 1),),
        rows=(Row(0, 0, 3, True, drafts=2), Row(1, 0, 1, False)),
        snapshots=(StateSnapshot(0, 0, 4, 7),),
    )


def test_a_plan_that_repeats_does_so_on_the_ranks_that_have_rows() -> None:
    info = msgspec.structs.replace(INFO, data_ranks=2)
    whole = plan(0, 1, repeats=True)
    assert [part_of(whole, info, r, rows_of(whole, info, r)).repeats for r in (0, 1)] == [True, False]


def test_masks_go_to_the_rank_of_their_row() -> None:
    alone = [Scripted(result(7), max_slots=2), Scripted(result(8), max_slots=2)]
    group = RankGroup([DataRank(runner, i, 2) for i, runner in enumerate(alone)])
    assert (group.info.max_slots, group.info.data_ranks) == (4, 2)
    group.sample(group.forward(plan(2, 0)), {0: b"of slot 2"}).wait()
    assert [runner.masks for runner in alone] == [[{}], [{0: b"of slot 2"}]]


# Beside steps


def grouped(*ranks: Scripted) -> RankGroup:
    """The first is tensor-parallel rank 0 of data-parallel rank 0."""
    return RankGroup([DataRank(rank, i, len(ranks)) for i, rank in enumerate(ranks)])


def test_adapters_are_installed_on_all_ranks_or_on_none() -> None:
    ranks = Scripted(max_adapters=2), Scripted(max_adapters=2)
    group = grouped(*ranks)
    assert isinstance(group, AdapterRunner)
    info, adapter = group.read_adapter("a", "/a")
    assert info == "a"
    group.install_adapter(1, adapter)
    assert [rank.adapters for rank in ranks] == [{1: "/a"}] * 2
    ranks[1].refuses = True
    with pytest.raises(ModelFileError, match="no room"):
        group.install_adapter(0, adapter)
    assert [rank.adapters for rank in ranks] == [{1: "/a"}] * 2
    group.remove_adapter(1)
    assert [rank.adapters for rank in ranks] == [{}, {}]


def test_ranks_that_read_different_adapters_are_noticed() -> None:
    with pytest.raises(ModelFileError, match="changed while the ranks read them"):
        grouped(Scripted(max_adapters=1), Scripted(max_adapters=1)).read_adapter("a", "")


def test_a_group_is_ready_when_all_its_ranks_are() -> None:
    ranks = Scripted(), Scripted()
    group = grouped(*ranks)
    assert isinstance(group, Preparing)
    ranks[0].left_to_prepare, ranks[1].left_to_prepare = 1, 3
    assert [group.prepare() for _ in range(3)] == [True, True, False]


def test_all_ranks_are_closed_even_if_one_does_not() -> None:
    ranks = Scripted(), Scripted()
    ranks[0].refuses = True
    with pytest.raises(OSError, match="cannot close"):
        grouped(*ranks).close()
    assert ranks[1].closed


def test_null_ranks_read_the_same_files(tmp_path: Path) -> None:
    file = tmp_path / "adapter"
    file.write_text("content")
    group: Runner = null_ranks(null_config(max_adapters=1), 2, 2)
    assert isinstance(group, RankGroup) and len(group.ranks) == 4
    info, adapters = group.read_adapter("a", str(file))
    assert adapters == [info.digest] * 4
    with pytest.raises(PegaError, match="cannot read the adapter"):
        group.read_adapter("a", str(tmp_path / "none"))
