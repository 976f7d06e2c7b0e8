"""How work is dealt, and what is said about the client itself."""

from __future__ import annotations

import pytest

from pegainfer.bench.cost import ClientCost
from pegainfer.bench.processes import deal, process_count
from pegainfer.bench.wire import Job, Outcome, Record

JOBS = [Job(i, 0.0, b"") for i in range(10)]


def test_every_job_goes_to_one_process_and_places_are_shared() -> None:
    shares = deal(JOBS, 2, 3)
    assert [places for _, places in shares] == [2, 1]
    assert [[job.index for job in jobs] for jobs, _ in shares] == [[0, 2, 3, 5, 6, 8, 9], [1, 4, 7]]


def test_without_a_bound_jobs_alternate() -> None:
    assert [([j.index for j in jobs], places) for jobs, places in deal(JOBS, 2, 0)] == [
        ([0, 2, 4, 6, 8], 0),
        ([1, 3, 5, 7, 9], 0),
    ]


def test_no_more_processes_than_places() -> None:
    assert process_count(8, 3) == 3
    assert process_count(0, 1) == 1
    assert process_count(2, 100) == 2


def outcome(cpu: float, lags: list[float], late: list[float] | None = None) -> Outcome:
    records = [Record(0, chunks=50), Record(1, chunks=50)]
    return Outcome(records=records, cpu_seconds=cpu, wall_seconds=10.0, lags=lags, late=late or [])


def test_a_client_that_kept_up_says_nothing() -> None:
    cost = ClientCost.of([outcome(1.0, [0.001]), outcome(2.0, [0.001])], scheduled=True)
    assert (cost.processes, cost.cpu_seconds, cost.busiest) == (2, 3.0, 0.2)
    assert cost.cpu_per_event == pytest.approx(3.0 / 200)
    assert not cost.bottleneck
    assert cost.verdicts() == []


def test_a_busy_process_is_the_bottleneck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    cost = ClientCost.of([outcome(9.5, [0.001]), outcome(2.0, [0.001])], scheduled=True)
    assert cost.bottleneck
    (verdict,) = cost.verdicts()
    assert "95% of a core" in verdict and "--client-processes 2" in verdict


def test_all_cores_taken_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    cost = ClientCost.of([outcome(9.5, []), outcome(9.0, [])], scheduled=True)
    assert cost.bottleneck
    assert "all its cores" in cost.verdicts()[0]


def test_lateness_counts_only_where_there_was_a_time() -> None:
    late = [outcome(1.0, [0.001], late=[0.5] * 10)]
    assert ClientCost.of(late, scheduled=True).bottleneck
    assert "after their time" in ClientCost.of(late, scheduled=True).verdicts()[0]
    assert not ClientCost.of(late, scheduled=False).bottleneck


def test_late_timers_are_noted() -> None:
    cost = ClientCost.of([outcome(1.0, [0.03] * 100)], scheduled=False)
    assert not cost.bottleneck
    assert "30 ms late" in cost.verdicts()[0]
