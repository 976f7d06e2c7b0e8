"""Lines, JSON keys and pictures of one run."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from pegainfer.bench.config import DatasetConfig, LoadConfig, ReportConfig, SamplingConfig, ServerConfig
from pegainfer.bench.cost import ClientCost
from pegainfer.bench.metrics import figures
from pegainfer.bench.page import page, ticks
from pegainfer.bench.report import lines, notes, shown_metrics
from pegainfer.bench.result import result, save
from pegainfer.bench.run import Plan, Run, file_stem
from pegainfer.bench.series import cdf, in_flight, rate, series
from pegainfer.bench.server_cost import ServerCost
from pegainfer.bench.wire import Record
from pegainfer.contract.errors import ConfigError


def a_run(stream: bool = True, **report: Any) -> Run:
    plan = Plan(
        server=ServerConfig(),
        load=LoadConfig(num_prompts=3, max_concurrency=2, request_rate=4.0),
        dataset=DatasetConfig(),
        sampling=SamplingConfig(stream_response=stream),
        report=ReportConfig(**report),
        text=None,
    )
    records = [
        Record(
            0, start=100.0, ttft=0.1, itls=[0.02, 0.04], latency=0.16, chunks=3, output_tokens=3, text="a"
        ),
        Record(1, start=100.1, queued=0.05, ttft=0.3, itls=[0.1], latency=0.4, chunks=2, output_tokens=2),
        Record(2, start=100.0, latency=0.5, error="HTTP 503: <full>"),
    ]
    return Run(
        plan=plan,
        model="org/model",
        start=100.0,
        records=records,
        input_lens=[10, 20, 40],
        mismatched=0,
        figures=figures(
            records,
            input_lens=[10, 20, 40],
            duration=0.5,
            percentiles=plan.report.percentiles(),
            slos=plan.report.slos(),
        ),
        cost=ClientCost(
            processes=1,
            cpu_seconds=0.1,
            cpu_per_event=0.00001,
            busiest=0.2,
            lag_p99=0.001,
            late_p99=0.0,
            machine_share=0.1,
        ),
        probe=None,
        server=None,
    )


def told(run: Run) -> list[str]:
    plan = run.plan
    return lines(
        run.figures,
        plan.load,
        plan.report,
        run.cost,
        run.probe,
        run.server,
        stream=plan.sampling.stream_response,
    )


def test_the_servers_own_cost_is_told_by_step_request_and_token() -> None:
    kinds = {"decode": (15, 0.1), "mixed": (5, 0.3)}
    seconds = {"schedule": 0.002, "stage": 0.001, "tokenize": 0.004, "detokenize": 0.0005}
    cost = ServerCost(host_seconds=seconds, steps=20, step_seconds=0.4, kinds=kinds, cached_share=0.25)
    run = dataclasses.replace(a_run(), server=cost)
    out = told(run)
    at = out.index("----------------------Server----------------------")
    assert out[at + 1 : at + 13] == [
        "Steps:                                   20        ",
        "Mean step (ms):                          20.00     ",
        "Steps, decode:                           15        ",
        "Mean step, decode (ms):                  6.67      ",
        "Steps, mixed:                            5         ",
        "Mean step, mixed (ms):                   60.00     ",
        "Device in steps (%):                     80.00     ",
        "Prompt tokens from cache (%):            25.00     ",
        "Host schedule (us/step):                 100.00    ",
        "Host stage (us/step):                    50.00     ",
        "Host tokenize (us/request):              2000.00   ",
        "Host detokenize (us/token):              100.00    ",
    ]
    saved = result(run, {})
    assert saved["server_host_seconds"] == seconds
    assert (saved["server_steps"], saved["server_cached_share"]) == (20, 0.25)


def test_the_lines_are_those_users_know() -> None:
    out = told(a_run(goodput=("ttft:200",), metric_percentiles="50,99.9"))
    assert out[0] == "============ Serving Benchmark Result ============"
    assert len(out[0]) == len(out[-1]) == 50
    wanted = [
        "Successful requests:                     2         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             2         ",
        "Request rate configured (RPS):           4.00      ",
        "Benchmark duration (s):                  0.50      ",
        "Total input tokens:                      30        ",
        "Total generated tokens:                  5         ",
        "Request throughput (req/s):              4.00      ",
        "Request goodput (req/s):                 2.00      ",
        "Output token throughput (tok/s):         10.00     ",
        "Peak output token throughput (tok/s):    5.00      ",
        "Peak concurrent requests:                2.00      ",
        "Total token throughput (tok/s):          70.00     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          200.00    ",
        "Median TTFT (ms):                        200.00    ",
        "P50 TTFT (ms):                           200.00    ",
        "P99.9 TTFT (ms):                         299.80    ",
        "-----Time per Output Token (excl. 1st token)------",
    ]
    assert out[1 : 1 + len(wanted)] == wanted


def test_metrics_are_chosen_and_a_whole_answer_has_only_its_latency() -> None:
    assert shown_metrics(ReportConfig(), stream=True) == ["ttft", "tpot", "itl"]
    assert shown_metrics(ReportConfig(percentile_metrics="e2el, ttft"), stream=True) == ["ttft", "e2el"]
    assert shown_metrics(ReportConfig(), stream=False) == ["e2el"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"percentile_metrics": "ttft,speed"},
        {"metric_percentiles": "99,101"},
        {"metric_percentiles": "many"},
        {"goodput": ("itl:3",)},
        {"goodput": ("ttft",)},
        {"goodput": ("ttft:-1",)},
        {"metadata": ("version",)},
    ],
)
def test_choices_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        ReportConfig(**wrong)


def test_json_keys_and_arrays() -> None:
    run = a_run(metadata=("version=1", "tp=2"), save_detailed=True, goodput=("e2el:170",))
    out = json.loads(json.dumps(result(run, {"commit": "abc"})))
    assert out["request_throughput"] == pytest.approx(4.0)
    assert out["request_goodput"] == pytest.approx(2.0)
    assert out["mean_ttft_ms"] == pytest.approx(200.0)
    assert out["p99_tpot_ms"] == pytest.approx(30 + 0.99 * 70)
    assert out["std_itl_ms"] == pytest.approx(33.993463, rel=1e-6)  # of 20, 40, 100
    assert (out["completed"], out["failed"], out["num_prompts"]) == (2, 1, 3)
    assert (out["total_input_tokens"], out["total_output_tokens"]) == (30, 5)
    assert (out["version"], out["tp"], out["commit"]) == ("1", "2", "abc")
    assert (out["backend"], out["label"], out["model_id"]) == ("openai", "openai", "org/model")
    assert out["input_lens"] == [10, 20, 40] and out["output_lens"] == [3, 2, 0]
    assert out["itls"] == [[0.02, 0.04], [0.1], []]
    assert out["errors"] == ["", "", "HTTP 503: <full>"]
    assert out["queue_times"] == [0.0, 0.05, 0.0]
    assert "ttfts" not in result(a_run(), {})
    assert a_run(goodput=()).figures.request_goodput is None


def test_an_infinite_rate_is_a_word() -> None:
    run = a_run()
    out = result(run, {})
    assert out["request_rate"] == 4.0
    assert file_stem(run).startswith("openai-4.0qps-concurrency2-model-")


def test_results_are_appended_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    save(path, {"a": 1}, append=True)
    save(path, {"a": 2}, append=True)
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2]
    save(path, {"a": 3}, append=False)
    assert json.loads(path.read_text()) == {"a": 3}


def test_notes_count_reasons() -> None:
    run = a_run()
    assert notes(run.figures, run.cost, 0) == ["failed: 1 × HTTP 503: <full>"]
    assert "for 2 requests" in notes(run.figures, run.cost, 2)[1]


def test_series_of_a_run() -> None:
    data = series(a_run())
    assert set(data.cdfs) == {"TTFT", "TPOT", "ITL", "E2EL"}
    assert [
        (round(b.arrived, 6), round(b.sent, 6), round(b.first, 6), round(b.end, 6)) for b in data.bars
    ] == [
        (0.0, 0.0, 0.1, 0.16),
        (0.05, 0.1, 0.4, 0.5),
        (0.0, 0.0, 0.5, 0.5),
    ]
    assert data.left_out == 0
    width = data.tokens[1][0] - data.tokens[0][0]
    assert sum(height * width for _, height in data.tokens) == pytest.approx(5)


def test_points_of_curves() -> None:
    assert cdf([0.002, 0.001]) == [(1.0, 0.5), (2.0, 1.0)]
    assert len(cdf([i / 1000 for i in range(5000)])) == 400
    assert rate([0.01, 0.02, 0.99], 1.0)[0] == (pytest.approx(0.025), pytest.approx(40.0))
    assert max(n for _, n in in_flight([(0.0, 1.0), (0.4, 0.6)], 1.0)) == 2.0
    assert ticks(10.0) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert ticks(0.7) == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert ticks(0.0) == [0.0]


def test_the_page_stands_alone() -> None:
    text = page(a_run(), ["failed: 1 × HTTP 503: <full>"])
    for outside in ("http://", "https://", "<script", "<link", "url(", "@import", "src="):
        assert outside not in text
    assert "prefers-color-scheme:dark" in text
    assert "&lt;full&gt;" in text and "<full>" not in text
    body = (
        text.split("\n", 1)[1]
        .replace('<meta charset="utf-8">', "")
        .replace('<meta name="viewport" content="width=device-width">', "")
    )
    root = ElementTree.fromstring(body)  # well-formed: every tag is closed
    charts = [svg for svg in root.iter("svg")]
    assert len(charts) == 4 + 3 + 1
    assert sum(rect.get("class") == "failed" for rect in root.iter("rect")) == 1


def test_a_run_without_success_has_a_page_too() -> None:
    run = a_run()
    for record in run.records:
        record.error = "no connection"
    assert "<svg" in page(run, [])


def test_the_png_is_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from pegainfer.bench.png import save_png

    save_png(a_run(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
