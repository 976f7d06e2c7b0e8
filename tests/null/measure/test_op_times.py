"""Which forward passes are sampled, and that each sampled program's times are taken once."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.measure.op_times import OpTimes
from tests.null.measure.test_profile import FakeBackend, program

INPUTS = {"a": np.ones(3)}
FORWARD, SAMPLER = {"T": 1, "C": 8}, {"L": 1}
# The fake executor takes 1, 2, 3 and 4 µs for its calls, the first two of which are one op.
ONCE = {"linear 32→32": 3e-6, "linear 32→64": 3e-6, "silu_mul": 4e-6}


def test_one_forward_pass_of_a_period_is_sampled_with_what_follows_it() -> None:
    times, backend = OpTimes(period=3), FakeBackend()
    executor = times.around(backend).prepare(program(), {}, {})
    times.switch(True)
    taken = []
    for _ in range(7):
        executor.run(INPUTS, FORWARD)
        executor.run(INPUTS, SAMPLER)
        taken.append(times.take())
    twice = {name: 2 * seconds for name, seconds in ONCE.items()}
    for i, found in enumerate(taken):
        assert found == (pytest.approx(twice) if i in (2, 5) else {}), i
    assert backend.executors[0].ran == [FORWARD, SAMPLER] * 7


def test_nothing_is_timed_while_it_is_off() -> None:
    times, backend = OpTimes(period=1), FakeBackend()
    executor = times.around(backend).prepare(program(), {}, {})
    executor.run(INPUTS, FORWARD)
    assert times.take() == {}
    times.switch(True)
    executor.run(INPUTS, FORWARD)
    times.switch(False)
    executor.run(INPUTS, FORWARD)
    assert times.take() == pytest.approx(ONCE)
    assert times.take() == {}
