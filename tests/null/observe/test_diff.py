"""Which op has become slower between two traces, through noise, and `pegainfer trace diff`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pegainfer.cli.main import main
from pegainfer.contract.trace import StepTrace
from pegainfer.observe.diff import host_changes, op_changes, regressions, step_changes
from pegainfer.observe.trace import RingBuffer
from tests.null.observe.test_explain import step

OPS = {"attention": 2e-3, "gate_up_swiglu 64→256": 3e-3, "linear 64→64": 1e-3, "norm": 5e-6, "sample": 4e-4}


def sampled(seed: int, *, noise: float = 0.03, **slower: float) -> list[StepTrace]:
    """160 steps, of which every fourth has the ops' times; factors of ops whose names begin so."""
    r = random.Random(seed)
    steps = []
    for i in range(160):
        rows = 4 if i % 2 else 40
        factor = {name: next((f for n, f in slower.items() if name.startswith(n)), 1.0) for name in OPS}
        ops = {n: s * rows * factor[n] * (1 + noise * r.random()) for n, s in OPS.items()}
        steps.append(step(i, decode_rows=rows, ops=ops if i % 8 < 2 else {}, device=sum(ops.values())))
    return steps


@pytest.mark.parametrize("name", ["attention", "gate_up", "linear", "sample"])
@pytest.mark.parametrize("factor", [1.2, 2.0])
def test_a_planted_regression_is_the_only_one_named(name: str, factor: float) -> None:
    (found,) = regressions(op_changes(sampled(1), sampled(2, **{name: factor})), 0.1)
    assert found.name.startswith(name)
    assert found.ratio == pytest.approx(factor, rel=0.03)
    assert found.relative == pytest.approx(factor, rel=0.03)


def test_no_regression_is_named_in_noise_or_on_a_slower_machine() -> None:
    everything = {name.split()[0]: 1.5 for name in OPS}
    assert regressions(op_changes(sampled(1), sampled(2)), 0.1) == []
    changes = op_changes(sampled(1), sampled(2, **everything))
    assert [c.ratio for c in changes] == pytest.approx([1.5] * 5, rel=0.05)
    assert regressions(changes, 0.1) == []
    assert regressions(op_changes(sampled(1), sampled(2, norm=3.0)), 0.1) == []  # takes next to nothing


def test_sizes_that_only_one_trace_has_do_not_count() -> None:
    before = sampled(1)
    after = [s for s in sampled(2, attention=1.3) if s.decode_rows == 4]
    attention = next(c for c in op_changes(before, after) if c.name == "attention")
    assert attention.before == pytest.approx(4 * OPS["attention"], rel=0.03)
    assert attention.ratio == pytest.approx(1.3, rel=0.03)
    assert op_changes(before, after[:4]) == []  # too few samples


def test_steps_and_the_host_are_compared_by_size() -> None:
    small, large = sorted(step_changes(sampled(1), sampled(2, attention=1.5)), key=lambda c: c.before)
    assert "up to 7 decodes" in small.name and "up to 63 decodes" in large.name
    plain = [step(i) for i in range(20)]
    slow = [step(i, stages={"schedule": 0.0006}) for i in range(20)]
    found = {c.name: c.ratio for c in host_changes(plain, slow)}
    assert found == {"host: schedule": pytest.approx(3.0), "host: launch": pytest.approx(1.0)}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, steps in (("a", sampled(1)), ("b", sampled(2, gate_up=1.2)), ("none", [])):
        buffer = RingBuffer()
        buffer.steps(steps)
        paths.append(str(buffer.write(tmp_path).rename(tmp_path / f"{name}.json")))
    a, b, none = paths
    assert main(["trace", "diff", a, b]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("slower: gate_up_swiglu 64→256, 1.")
    assert main(["trace", "diff", a, b, "--regression", "0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing has become slower by 50%"
    assert main(["trace", "diff", a, none]) == 2
    assert "no steps of the same size" in capsys.readouterr().err
