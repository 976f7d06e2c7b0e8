"""Blocks run out: who is preempted, and what admissions leave to those that run."""

from __future__ import annotations

from pegainfer.contract.request import pack_tokens
from tests.null.engine.driving import driver, ids
from tests.null.engine.harness import request


def test_the_youngest_is_preempted_and_its_tokens_do_not_change() -> None:
    d = driver(num_blocks=(12,), config={"watermark": 0.0, "prefix_cache": False})
    for name in "abc":
        d.add(request(name, ids(8, ord(name)), max_tokens=30, eos=()))
    preempted: set[str] = set()
    while d.scheduler.has_work():
        d.step()
        preempted |= {seq.request.id for seq in d.waiting if seq.entered}
    assert preempted == {"b", "c"}  # never the oldest
    assert d.scheduler.stats().preemptions >= 2
    d.judge()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    d = driver(num_blocks=(16,), config={"watermark": 0.0})
    for name in "ab":
        d.add(request(name, ids(20, ord(name)), max_tokens=20, eos=()))
    d.run()
    d.judge()
    assert d.scheduler.stats().preemptions > 0
    again = [r for plan in d.plans for new in plan.news for r in plan.rows if r.slot == new.slot and r.start]
    assert again  # it started beyond position 0


def test_a_preempted_sequence_waits_for_its_last_tokens() -> None:
    d = driver(depth=2)
    d.add(request("r", ids(6), max_tokens=9, eos=()))
    d.launch()
    d.scheduler._residents.preempt(d.running[0])
    assert d.launch() is None  # there is room, but the token in flight is not known yet
    d.commit()
    assert d.answers["r", 0].tokens == d.expected("r", 0)[:1]
    plan = d.launch()
    assert plan is not None
    assert plan.news[0].tokens == pack_tokens([*ids(6), *d.answers["r", 0].tokens])
    d.run()
    d.judge()


def test_admission_leaves_the_watermark() -> None:
    d = driver(depth=1, num_blocks=(10,), max_tokens=64, config={"watermark": 0.5})
    d.add(request("a", ids(8), max_tokens=2, eos=()))
    d.add(request("b", ids(16, 3), max_tokens=2, eos=()))
    d.step()
    # 10 blocks, 2 taken: b's 4 would leave 4, under the 5 of the watermark.
    assert [seq.request.id for seq in d.running] == ["a"]
    d.run()
    d.judge()


def test_alone_the_watermark_does_not_hold() -> None:
    d = driver(num_blocks=(10,), max_tokens=64, config={"watermark": 0.9})
    d.add(request("a", ids(30), max_tokens=2))
    d.run()
    d.judge()
