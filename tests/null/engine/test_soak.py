"""Random scenarios, and a state machine that hypothesis shrinks; the counts are printed after the run.

SOAK_SEEDS=5000 in the environment runs more; `python -m tests.null.engine.soak` prints the counts alone.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pegainfer.contract.errors import RequestError
from pegainfer.engine.scheduler import SchedulerConfig
from tests.null.engine.harness import EOS, SPECS, Driver, null_config, request
from tests.null.engine.soak import run_seeds

SEEDS = int(os.environ.get("SOAK_SEEDS", "320"))
PARTS = 8


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_scenarios(part: int, soak_counts: Counter[str]) -> None:
    share = SEEDS // PARTS
    soak_counts.update(run_seeds(part * share, share))


def test_the_scenarios_reach_every_corner() -> None:
    counts = run_seeds(0, 64)
    for what in (
        "preemptions",
        "prefix hits (tokens)",
        "copies",
        "snapshots",
        "follow rows",
        "wasted rows",
        "rows that committed 0",
        "rows that committed 4",
        "loads that failed",
        "requests with adapters",
        "adapters removed",
        "adapter loads that failed",
        "cache resets",
        "steps of several data ranks",
        "mixed steps",
        "finish stop",
        "finish length",
        "finish abort",
        "finish error",
    ):
        assert counts[what] > 0, what


def test_who_waits_for_what_is_in_flight_is_not_passed_over() -> None:
    driver = Driver(null_config(max_slots=1), SchedulerConfig(pipeline_depth=2))
    driver.add(request("a", [1, 2, 3], max_tokens=1))
    assert driver.launch() is not None
    assert [driver.launch() for _ in range(20)] == [None] * 20
    driver.run(3)
    driver.judge()


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, launches, commits and cancels in any order; the driver judges after each of them."""

    @initialize(
        kv=st.sampled_from(sorted(SPECS)),
        blocks=st.integers(8, 24),
        slots=st.integers(1, 4),
        tokens=st.sampled_from([1, 4, 12, 24]),
        commit=st.sampled_from([1, 3]),
        zero=st.sampled_from([0.0, 0.3]),
        depth=st.sampled_from([1, 2]),
        cache=st.booleans(),
    )
    def build(
        self,
        kv: str,
        blocks: int,
        slots: int,
        tokens: int,
        commit: int,
        zero: float,
        depth: int,
        cache: bool,
    ) -> None:
        groups = SPECS[kv]
        self.driver = Driver(
            null_config(
                kv=groups,
                num_blocks=(blocks,) * len(groups.groups),
                max_slots=slots,
                max_tokens=tokens,
                max_commit=commit,
                zero_commits=zero,
            ),
            SchedulerConfig(pipeline_depth=depth, prefix_cache=cache, aging_seconds=10.0),
        )

    @rule(
        length=st.integers(1, 40),
        shared=st.integers(0, 40),
        n=st.sampled_from([1, 1, 3]),
        most=st.sampled_from([0, 1, 7, None]),
        priority=st.integers(-1, 1),
        wait=st.sampled_from([None, 3, 30]),
        eos=st.sampled_from([(), (EOS,)]),
        salt=st.sampled_from(["", "x"]),
        seed=st.integers(0, 3),
    )
    def add(
        self,
        length: int,
        shared: int,
        n: int,
        most: int | None,
        priority: int,
        wait: int | None,
        eos: tuple[int, ...],
        salt: str,
        seed: int,
    ) -> None:
        prompt = [i % 7 if i < shared else (i * i + seed) % 20 for i in range(length)]
        d = self.driver
        options: dict[str, Any] = {
            "n": n,
            "salt": salt,
            "priority": priority,
            "deadline": None if wait is None else d.now + wait,
            "eos": eos,
            "seed": seed,
            "max_tokens": most,
        }
        try:
            d.add(request(f"r{len(d.requests)}", prompt, **options))
        except RequestError:
            # Only a pool that is smaller than the request may refuse it.
            assert length + (most or 0) > min(d.null.max_model_len, d.scheduler._admission.reach) - 1

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule()
    def launch(self) -> None:
        self.driver.launch()

    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        self.driver.cancel(f"r{which}")

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run(3000)
            self.driver.judge()


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True
)
TestSchedulerMachine = SchedulerMachine.TestCase
