"""Figures against values worked out by hand."""

from __future__ import annotations

import pytest

from pegainfer.bench.metrics import Distribution, figures, peak_concurrent, peak_output, token_times
from pegainfer.bench.wire import Record


def record(index: int, start: float, ttft: float, itls: list[float], **more: object) -> Record:
    fields = {"latency": ttft + sum(itls), "chunks": 1 + len(itls), "output_tokens": 1 + len(itls)}
    return Record(index, start=start, ttft=ttft, itls=itls, **(fields | more))  # type: ignore[arg-type]


def test_a_distribution_is_that_of_the_textbook() -> None:
    found = Distribution.of([0.001, 0.002, 0.003, 0.004, 0.010], (0, 50, 90, 99, 100))
    assert found.mean == pytest.approx(4.0)
    assert found.median == pytest.approx(3.0)
    assert found.std == pytest.approx(10.0**0.5)  # squares 9, 4, 1, 0, 36 over 5
    # Rank p/100·4 between the ordered values: 90 → 3.6, 99 → 3.96.
    values = [value for _, value in found.percentiles]
    assert values == pytest.approx([1.0, 3.0, 4 + 0.6 * 6, 4 + 0.96 * 6, 10.0])


def test_a_distribution_of_nothing_is_zero() -> None:
    found = Distribution.of([], (99,))
    assert (found.mean, found.median, found.std, found.percentiles) == (0.0, 0.0, 0.0, ((99, 0.0),))


def test_figures_of_three_requests_of_which_one_failed() -> None:
    records = [
        record(0, 100.0, 0.1, [0.02, 0.04]),  # 3 tokens in 0.16 s, TPOT 0.03
        record(1, 100.1, 0.3, [0.1]),  # 2 tokens in 0.4 s, TPOT 0.1
        Record(2, start=100.0, latency=0.5, error="HTTP 503: full"),
    ]
    f = figures(records, input_lens=[10, 20, 40], duration=0.5, percentiles=(50,), slos={})
    assert (f.completed, f.failed, f.total_input, f.total_output) == (2, 1, 30, 5)
    assert f.request_throughput == pytest.approx(4.0)
    assert f.output_throughput == pytest.approx(10.0)
    assert f.total_token_throughput == pytest.approx(70.0)
    assert f.distributions["ttft"].mean == pytest.approx(200.0)
    assert f.distributions["tpot"].mean == pytest.approx(65.0)
    assert f.distributions["itl"].median == pytest.approx(40.0)  # of 20, 40, 100
    assert f.distributions["e2el"].mean == pytest.approx(280.0)
    assert f.output_lens == [3, 2, 0]
    assert f.failures == {"HTTP 503: full": 1}
    assert f.request_goodput is None
    assert f.uncounted == 0


@pytest.mark.parametrize(
    ("slos", "good"),
    [
        ({"ttft": 100.1}, 1),
        ({"ttft": 300.1}, 2),
        ({"tpot": 30.1}, 1),
        ({"e2el": 159.0}, 0),
        ({"ttft": 300.1, "tpot": 99.0}, 1),
        ({"ttft": 300.1, "tpot": 101.0, "e2el": 401.0}, 2),
    ],
)
def test_goodput_counts_requests_that_meet_every_bound(slos: dict[str, float], good: int) -> None:
    records = [
        record(0, 0.0, 0.1, [0.02, 0.04]),
        record(1, 0.0, 0.3, [0.1]),
        Record(2, error="connection closed", ttft=0.001, latency=0.002),
    ]
    f = figures(records, input_lens=[1, 1, 1], duration=2.0, percentiles=(), slos=slos)
    assert f.request_goodput == pytest.approx(good / 2)


def test_one_token_has_no_time_per_token_and_meets_its_bound() -> None:
    f = figures([record(0, 0.0, 0.1, [])], input_lens=[1], duration=1.0, percentiles=(), slos={"tpot": 0.001})
    assert f.tpots == [0.0]
    assert f.distributions["tpot"].mean == 0.0
    assert f.request_goodput == 1.0


def test_output_without_usage_counts_events() -> None:
    f = figures(
        [record(0, 0.0, 0.1, [0.1, 0.1], output_tokens=None)],
        input_lens=[1],
        duration=1.0,
        percentiles=(),
        slos={},
    )
    assert (f.total_output, f.uncounted) == (3, 1)


def test_peak_concurrency_of_half_open_intervals() -> None:
    spans = [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (3.0, 0.5)]  # the third starts as the first ends
    assert peak_concurrent([Record(i, start=s, latency=d) for i, (s, d) in enumerate(spans)]) == 2
    assert peak_concurrent([]) == 0


def test_peak_output_is_the_fullest_second_of_the_run() -> None:
    records = [record(0, 10.0, 0.5, [0.25, 0.25, 0.125]), record(1, 10.75, 0.5, [0.5])]
    # Tokens at 0.5, 0.75 | 1.0, 1.125, 1.25, 1.75
    assert peak_output(records) == 4.0
    assert peak_output([]) == 0.0


def test_a_whole_answers_tokens_count_at_its_end() -> None:
    assert token_times(Record(0, start=1.0, latency=0.5, output_tokens=3)) == [1.5, 1.5, 1.5]
