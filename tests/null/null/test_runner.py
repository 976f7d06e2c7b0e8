"""The null device: pure tokens, and every way in which a wrong plan must be noticed."""

from __future__ import annotations

import msgspec
import pytest

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import (
    NO_BLOCK,
    BlockCopy,
    NewSlot,
    Row,
    SlotBlocks,
    StateSnapshot,
    StepPlan,
    StepResult,
)
from pegainfer.null.config import NullConfig
from pegainfer.null.model import NullModel
from pegainfer.null.runner import NullRunner
from tests.null.engine.harness import ALL, EOS, HYBRID, MODEL, PAGES, WINDOW, null_config

PROMPT = [1, 2, 3, 4, 5, 6]


def new(slot: int = 0, seq: int = 0, tokens: list[int] = PROMPT) -> NewSlot:
    sampling = SamplingParams()
    return NewSlot(
        slot=slot, seq=seq, tokens=pack_tokens(tokens), num_prompt=len(PROMPT), sampling=sampling, seed=5
    )


def run(runner: NullRunner, plan: StepPlan) -> StepResult:
    return runner.sample(runner.forward(plan)).wait()


def first_plan(count: int = 6, blocks: tuple[int, ...] = (3, 4)) -> StepPlan:
    """Slot 0 enters with blocks for 8 positions and computes the first `count` of its 6 tokens."""
    return StepPlan(
        step=1, news=(new(),), blocks=(SlotBlocks(0, 0, blocks),), rows=(Row(0, 0, count, count == 6),)
    )


# The model


def test_tokens_are_a_pure_function_of_seed_and_tokens() -> None:
    sampling = SamplingParams(max_tokens=20)
    a = MODEL.continuation(PROMPT, sampling, 5, max_model_len=64)
    assert a == MODEL.continuation(PROMPT, sampling, 5, max_model_len=64)
    assert a != MODEL.continuation(PROMPT, sampling, 6, max_model_len=64)
    assert a != MODEL.continuation([*PROMPT[:-1], 7], sampling, 5, max_model_len=64)
    assert a[3:] == MODEL.continuation(
        [*PROMPT, *a[:3]], msgspec.structs.replace(sampling, max_tokens=17), 5, max_model_len=64
    )


def test_greedy_knows_no_seed() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    answers = [MODEL.continuation(PROMPT, greedy, seed, max_model_len=64) for seed in (1, 2)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("sampling", "length"),
    [
        (SamplingParams(max_tokens=7, ignore_eos=True), 7),
        (SamplingParams(ignore_eos=True), 58),
        (SamplingParams(stop_token_ids=tuple(range(32))), 1),
    ],
)
def test_where_a_continuation_ends(sampling: SamplingParams, length: int) -> None:
    assert len(MODEL.continuation(PROMPT, sampling, 5, max_model_len=64)) == length


def test_stop_ids_are_not_drawn_until_min_tokens() -> None:
    sampling = SamplingParams(stop_token_ids=(3, 4, 5), min_tokens=20)
    tokens = MODEL.continuation(PROMPT, sampling, 5, eos_token_ids=(EOS,), max_model_len=64)
    assert not {3, 4, 5, EOS} & set(tokens[:20])
    assert tokens[-1] in (3, 4, 5, EOS)


def test_allowed_tokens_and_masks_are_obeyed() -> None:
    allowed = SamplingParams(allowed_token_ids=(25, 26))
    assert MODEL.draw(PROMPT, 1, 6, allowed, 5) in (25, 26)
    mask = bytearray(4)
    mask[3] = 1 << 3  # id 27
    assert MODEL.draw(PROMPT, 1, 6, SamplingParams(), 5, mask=bytes(mask)) == 27


def test_a_script_may_answer() -> None:
    model = NullModel(next_token=lambda tokens, num_prompt, seed: tokens[len(tokens) - num_prompt])
    runner = NullRunner(NullConfig(model=model))
    tokens = run(runner, first_plan()).tokens
    assert tokens == ((PROMPT[0],),)


def test_logprobs_are_led_by_the_drawn_token() -> None:
    got = MODEL.logprob(5, 99, 3)
    assert (got.token, got.rank, got.top[0]) == (5, 1, (5, got.logprob))
    assert sorted((p for _, p in got.top), reverse=True) == [p for _, p in got.top]


# The device


def test_a_prompt_and_two_tokens() -> None:
    runner = NullRunner(null_config())
    tokens = [*run(runner, first_plan()).tokens[0]]
    for step in (2, 3):
        plan = StepPlan(step=step, rows=(Row(0, 4 + step, 1, True),))
        tokens += run(runner, plan).tokens[0]
    expected = MODEL.continuation(PROMPT, SamplingParams(max_tokens=3), 5, max_model_len=64)
    assert tokens == expected


def test_the_latency_is_waited_for() -> None:
    runner = NullRunner(null_config(step_seconds=0.01, token_seconds=0.001))
    pending = runner.sample(runner.forward(first_plan()))
    assert not pending.done()
    assert pending.wait().seconds == pytest.approx(0.016)
    assert pending.done()


def test_faults_are_raised_or_returned() -> None:
    boom = NullRunner(null_config(faults=lambda plan: RuntimeError("boom")))
    pending = boom.sample(boom.forward(first_plan()))
    with pytest.raises(RuntimeError, match="boom"):
        pending.wait()
    bad = NullRunner(null_config(faults=lambda plan: {0: "bad"}))
    result = run(bad, first_plan())
    assert (result.tokens, result.errors) == (((),), {0: "bad"})


def second(**parts: object) -> StepPlan:
    return StepPlan(step=2, **parts)  # type: ignore[arg-type]


WRONG_SECOND_PLANS: dict[str, tuple[StepPlan, str]] = {
    "a step is missing": (StepPlan(step=3), "step 3 follows step 1"),
    "too many tokens": (second(rows=(Row(0, 6, 17, False),)), "a plan of 17 tokens"),
    "an empty slot is freed": (second(frees=(1,)), "freed but empty"),
    "a taken slot": (second(news=(new(),)), "is taken"),
    "a slot beyond the last": (second(news=(new(slot=4),)), "does not exist"),
    "two rows of a slot": (second(rows=(Row(0, 6, 1, True), Row(0, 6, 1, True))), "two rows"),
    "a gap": (second(rows=(Row(0, 7, 1, True),)), "starts at 7, expected 6"),
    "a repeated row": (second(rows=(Row(0, 5, 1, False),)), "starts at 5, expected 6"),
    "a sample before the last token": (second(rows=(Row(0, 6, 1, False),)), "does not fit 7 known"),
    "a row beyond the known": (second(rows=(Row(0, 6, 2, True),)), "does not fit 7 known"),
    "follow without a row in flight": (second(rows=(Row(0, 6, 1, True, True),)), "follow is True"),
    "a block that does not exist": (second(blocks=(SlotBlocks(0, 0, (64,)),)), "does not exist"),
    "a block twice in a table": (second(blocks=(SlotBlocks(0, 0, (3,)),)), "stands twice"),
    "no block in a full group": (second(blocks=(SlotBlocks(0, 0, (NO_BLOCK,)),)), "NO_BLOCK"),
    "a copy from nowhere": (
        second(news=(new(slot=1, seq=1),), blocks=(SlotBlocks(1, 0, (9,)),), copies=(BlockCopy(0, 8, 9),)),
        "never written",
    ),
    "a copy over another's block": (second(copies=(BlockCopy(0, 3, 4),)), "another sequence owns"),
    "a stolen block": (
        second(news=(new(slot=1, seq=1),), blocks=(SlotBlocks(1, 0, (3, 5)),), rows=(Row(1, 0, 6, True),)),
        "not its own",
    ),
    "a stale prefix": (
        second(
            news=(new(slot=1, seq=1, tokens=[9, 2, 3, 4, 5, 6]),),
            blocks=(SlotBlocks(1, 0, (3, 5)),),
            rows=(Row(1, 4, 2, True),),
        ),
        "holds something else",
    ),
    "a prefix that was never written": (
        second(news=(new(slot=1, seq=1),), blocks=(SlotBlocks(1, 0, (7, 5)),), rows=(Row(1, 4, 2, True),)),
        "holds something else",
    ),
    "no block for the position": (
        second(news=(new(slot=1, seq=1),), blocks=(SlotBlocks(1, 0, (5,)),), rows=(Row(1, 0, 6, True),)),
        "beyond the slot's tables",
    ),
    "drafts that the device does not make": (second(rows=(Row(0, 6, 1, True, False, 1),)), "too many drafts"),
    "a repetition of other rows": (second(rows=(Row(0, 6, 1, True),), repeats=True), "does not repeat"),
}


@pytest.mark.parametrize("name", WRONG_SECOND_PLANS)
def test_a_wrong_plan_is_noticed(name: str) -> None:
    plan, message = WRONG_SECOND_PLANS[name]
    runner = NullRunner(null_config())
    run(runner, first_plan())
    with pytest.raises(InvariantError, match=message):
        runner.forward(plan)


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (StateSnapshot(1, 1, 4, 2), "has no row"),
        (StateSnapshot(0, 1, 8, 2), "lies outside"),
        (StateSnapshot(0, 1, 4, 0), "which a sequence owns"),
        (StateSnapshot(0, 1, 4, 8), "names no state"),
        (StateSnapshot(0, 0, 4, 8), "names no state"),
    ],
)
def test_a_wrong_snapshot_is_noticed(snapshot: StateSnapshot, message: str) -> None:
    runner = NullRunner(null_config(kv=HYBRID, num_blocks=(64, 8)))
    blocks = (SlotBlocks(0, 0, (3, 4)), SlotBlocks(0, 1, (0,)))
    plan = StepPlan(step=1, news=(new(),), blocks=blocks, rows=(Row(0, 0, 6, True),), snapshots=(snapshot,))
    with pytest.raises(InvariantError, match=message):
        run(runner, plan)


@pytest.mark.parametrize("seed", range(8))
def test_a_row_with_drafts_commits_some_of_them_and_the_state_follows(seed: int) -> None:
    runner = NullRunner(null_config(kv=HYBRID, num_blocks=(64, 8), max_commit=3, zero_commits=0.3, seed=seed))
    blocks = (SlotBlocks(0, 0, tuple(range(4))), SlotBlocks(0, 1, (0,)))
    plan = StepPlan(step=1, news=(new(),), blocks=blocks, rows=(Row(0, 0, 6, True),))
    tokens = [*run(runner, plan).tokens[0]]
    for step in (2, 3, 4, 5):
        row = Row(0, len(PROMPT) + len(tokens) - 1, 1, True, False, 2)
        drawn = run(runner, StepPlan(step=step, rows=(row,))).tokens[0]
        assert len(drawn) <= 3
        tokens += drawn
    expected = MODEL.continuation(PROMPT, SamplingParams(ignore_eos=True), 5, max_model_len=64)
    assert tokens == expected[: len(tokens)]


def test_a_shared_full_block_is_fine() -> None:
    runner = NullRunner(null_config())
    first = run(runner, first_plan())
    hit = run(
        runner,
        second(news=(new(slot=1, seq=1),), blocks=(SlotBlocks(1, 0, (3, 5)),), rows=(Row(1, 4, 2, True),)),
    )
    assert hit.tokens == first.tokens


WRONG_IN_FLIGHT: dict[str, tuple[StepPlan, str]] = {
    "a slot is freed in flight": (second(frees=(0,)), "freed while a plan in flight"),
    "no follow": (second(rows=(Row(0, 6, 1, True),)), "follow is False"),
    "a follow that starts too low": (second(rows=(Row(0, 5, 1, True, True),)), "cannot follow"),
    "a follow of two tokens": (second(rows=(Row(0, 6, 2, True, True),)), "cannot follow"),
}


@pytest.mark.parametrize("name", WRONG_IN_FLIGHT)
def test_a_wrong_plan_beside_one_in_flight_is_noticed(name: str) -> None:
    plan, message = WRONG_IN_FLIGHT[name]
    runner = NullRunner(null_config())
    runner.sample(runner.forward(first_plan()))
    with pytest.raises(InvariantError, match=message):
        runner.forward(plan)


def test_a_block_is_not_overwritten_while_a_plan_in_flight_uses_it() -> None:
    runner = NullRunner(null_config())
    run(runner, first_plan())
    runner.sample(runner.forward(second(rows=(Row(0, 6, 1, True),))))
    # Slot 0 is dropped from the device's tables by force, as if its blocks had been freed too early.
    runner._memory.detach(runner.slots.pop(0))
    plan = StepPlan(
        step=3, news=(new(slot=1, seq=1),), blocks=(SlotBlocks(1, 0, (3, 4)),), rows=(Row(1, 0, 6, True),)
    )
    with pytest.raises(InvariantError, match="plan in flight uses it"):
        runner.forward(plan)


def test_three_plans_are_too_many() -> None:
    runner = NullRunner(null_config())
    for plan in (first_plan(), second(rows=(Row(0, 6, 1, True, True),))):
        runner.sample(runner.forward(plan))
    with pytest.raises(InvariantError, match="more than two plans"):
        runner.forward(StepPlan(step=3))


def test_forward_and_sample_alternate() -> None:
    runner = NullRunner(null_config())
    handle = runner.forward(first_plan())
    with pytest.raises(InvariantError, match="before the sampling"):
        runner.forward(second())
    runner.sample(handle)
    with pytest.raises(InvariantError, match="without a forward"):
        runner.sample(handle)


def hybrid_plan(start: int, state: int, copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return second(
        news=(new(slot=1, seq=1),),
        blocks=(SlotBlocks(1, 0, (3, 5)), SlotBlocks(1, 1, (state,))),
        copies=copies,
        rows=(Row(1, start, 6 - start, True),),
    )


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ((), "should be as of 4 tokens, holds None"),
        ((BlockCopy(1, 0, 1),), r"should be as of 4 tokens, holds \(6"),
        ((BlockCopy(1, 2, 1),), None),
    ],
    ids=["no copy", "another state", "the snapshot"],
)
def test_a_prefix_needs_its_state(copies: tuple[BlockCopy, ...], message: str | None) -> None:
    runner = NullRunner(null_config(kv=HYBRID, num_blocks=(64, 8)))
    run(
        runner,
        StepPlan(
            step=1,
            news=(new(),),
            blocks=(SlotBlocks(0, 0, (3, 4)), SlotBlocks(0, 1, (0,))),
            rows=(Row(0, 0, 4, False),),
            snapshots=(StateSnapshot(0, 1, 4, 2),),
        ),
    )
    run(runner, second(rows=(Row(0, 4, 2, True),)))
    plan = msgspec.structs.replace(hybrid_plan(4, 1, copies), step=3)
    if message is None:
        run(runner, plan)
        return
    with pytest.raises(InvariantError, match=message):
        runner.forward(plan)


def test_only_the_window_is_read() -> None:
    runner = NullRunner(null_config(kv=WINDOW, num_blocks=(32, 32)))
    tokens = [t % 20 for t in range(14)]
    entry = NewSlot(
        slot=0, seq=0, tokens=pack_tokens(tokens), num_prompt=14, sampling=SamplingParams(), seed=5
    )
    run(
        runner,
        StepPlan(
            step=1,
            news=(entry,),
            blocks=(SlotBlocks(0, 0, (0, 1)), SlotBlocks(0, 1, (0, 1, 2, 3))),
            rows=(Row(0, 0, 12, False),),
        ),
    )
    # Position 12 reads 7 to 11: a table without block 0 is enough, one without block 1 is not.
    for blocks, fits in (((NO_BLOCK, 1, 2, 9), True), ((NO_BLOCK, NO_BLOCK, 2, 9), False)):
        other = NullRunner(null_config(kv=WINDOW, num_blocks=(32, 32)))
        other._memory._pages = [{b: list(p) for b, p in pages.items()} for pages in runner._memory._pages]
        plan = StepPlan(
            step=1,
            news=(entry,),
            blocks=(SlotBlocks(0, 0, (0, 8)), SlotBlocks(0, 1, blocks)),
            copies=(BlockCopy(0, 1, 8),),
            rows=(Row(0, 12, 2, True),),
        )
        if fits:
            run(other, plan)
        else:
            with pytest.raises(InvariantError, match="reads positions 7"):
                other.forward(plan)


@pytest.mark.parametrize("kv", [PAGES, HYBRID, WINDOW, ALL])
def test_speculation_stays_within_the_tables(kv: object) -> None:
    blocks = (32,) * len(kv.groups)  # type: ignore[attr-defined]
    runner = NullRunner(null_config(kv=kv, num_blocks=blocks, max_commit=8))
    tables = tuple(
        SlotBlocks(0, g, (0, 1) if hasattr(group, "block_size") else (0,))
        for g, group in enumerate(kv.groups)  # type: ignore[attr-defined]
    )
    result = run(runner, StepPlan(step=1, news=(new(),), blocks=tables, rows=(Row(0, 0, 6, True),)))
    reach = min(2 * g.block_size for g in kv.groups if hasattr(g, "block_size"))  # type: ignore[attr-defined]
    assert 1 <= len(result.tokens[0]) <= reach - 5
