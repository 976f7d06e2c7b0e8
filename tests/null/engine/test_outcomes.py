"""What a step's result means: no token asked for, prompt logprobs, rows that fail."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.errors import RequestError
from pegainfer.contract.step import StepPlan
from tests.null.engine.driving import driver, finish, ids, prompt_tokens
from tests.null.engine.harness import BLOCK, request


def test_no_token_asked_for() -> None:
    d = driver()
    d.add(request("r", ids(9), n=2, max_tokens=0))
    _, events = d.scheduler.schedule(2.0)
    assert [(e.index, e.tokens, e.finish) for e in events] == [(0, (), "length"), (1, (), "length")]
    assert not d.scheduler.has_work()


def test_no_token_but_the_prompts_logprobs() -> None:
    d = driver(max_tokens=8)
    d.add(request("r", ids(21), n=2, max_tokens=0, prompt_logprobs=2))
    d.run()
    d.judge()
    event = d.answers["r", 0].finish
    assert event is not None and event.prompt_logprobs is not None
    assert [len(p.top) for p in event.prompt_logprobs if p] == [2] * 20
    assert prompt_tokens(d.plans, 21) == 20


@pytest.mark.parametrize(("context", "blocks"), [(64, 40), (1024, 16)])
def test_a_prompt_without_an_answer_may_fill_the_context(context: int, blocks: int) -> None:
    """The model's own, or what the KV blocks hold and the one token beyond them that none needs."""
    length = min(context, blocks * BLOCK + 1)
    d = driver(max_model_len=context, num_blocks=(blocks,))
    d.add(request("r", ids(length), max_tokens=0, prompt_logprobs=1))
    d.run()
    d.judge()
    event = d.answers["r", 0].finish
    assert event is not None and event.prompt_logprobs is not None
    assert len(event.prompt_logprobs) == length
    with pytest.raises(RequestError, match=rf"at most {length} tokens; got {length + 1}"):
        d.add(request("longer", ids(length + 1), max_tokens=0))
    with pytest.raises(RequestError, match=rf"at most {length - 1} tokens; got {length}"):
        d.add(request("answered", ids(length), max_tokens=1))


@pytest.mark.parametrize("num_blocks", [64, 14])
def test_prompt_logprobs_are_complete_after_chunks_and_preemptions(num_blocks: int) -> None:
    d = driver(max_tokens=7, num_blocks=(num_blocks,), config={"watermark": 0.0})
    d.add(request("other", ids(20), max_tokens=30, eos=()))
    d.add(request("r", ids(20, 5), n=2, max_tokens=20, prompt_logprobs=1, logprobs=1))
    d.run()
    d.judge()
    told = [new.sampling.prompt_logprobs for plan in d.plans for new in plan.news]
    assert told.count(1) >= 1
    assert (d.scheduler.stats().preemptions > 0) == (num_blocks == 14)


def failing(slot: int, step: int) -> Any:
    def faults(plan: StepPlan) -> dict[int, str]:
        return {i: "not finite" for i, row in enumerate(plan.rows) if (row.slot, plan.step) == (slot, step)}

    return faults


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_row_ends_its_sequence_alone(depth: int) -> None:
    d = driver(depth=depth, faults=failing(1, 4))
    for name in "abc":
        d.add(request(name, ids(4, ord(name)), max_tokens=9, eos=()))
    d.run()
    assert [finish(d, name) for name in "abc"] == ["length", "error", "length"]
    assert d.answers["b", 0].finish.error == "not finite"  # type: ignore[union-attr]
    d.judge()


def test_a_failed_prompt_ends_all_that_would_fork_from_it() -> None:
    d = driver(max_tokens=8, faults=failing(0, 2))
    d.add(request("r", ids(20), n=3, max_tokens=9))
    d.run()
    assert [finish(d, "r", i) for i in range(3)] == ["error"] * 3
    d.judge()


def test_a_failed_chunk_leaves_nothing_in_the_cache() -> None:
    d = driver(max_tokens=8, faults=failing(0, 2))
    d.add(request("r", ids(20), max_tokens=9))
    d.run()
    d.add(request("s", ids(20), max_tokens=2))
    d.run()
    assert d.answers["s", 0].finish.num_cached_tokens == 8  # type: ignore[union-attr]
    d.judge()
