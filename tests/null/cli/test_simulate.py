"""pegainfer simulate: a config.json is enough for a report, quick answers and sweeps; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pegainfer.ops.sample  # noqa: F401
from pegainfer.bench.config import SamplingConfig
from pegainfer.bench.datasets import Sample
from pegainfer.cli.commands import build_app
from pegainfer.cli.simulate_report import Point, knee, sweep_values, within_target
from pegainfer.cli.simulate_run import request_of, sampling_case
from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.contract.request import unpack_tokens
from pegainfer.ops.spec import REGISTRY
from tools.kernel_plans import MODELS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "qwen3-4b"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS["qwen3"][1]))
    return model


def simulate(*argv: object) -> Result:
    result = CliRunner().invoke(build_app(), ["simulate", *map(str, argv)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def simulated(folder: Path, *argv: object) -> dict[str, Any]:
    """The saved JSON of a run."""
    where = ("--save-result", "--result-dir", folder.parent, "--result-filename", "out.json")
    simulate(folder, "--card", "H100", "--temperature", 0, *where, *argv)
    return json.loads((folder.parent / "out.json").read_text())  # type: ignore[no-any-return]


def test_a_run_reports_what_bench_serve_reports_and_where_the_time_goes(folder: Path) -> None:
    out = simulated(folder, "--num-prompts", 16, "--max-concurrency", 8, "--plot-timeline")
    assert (out["backend"], out["completed"], out["failed"]) == ("simulate", 16, 0)
    assert (out["total_input_tokens"], out["total_output_tokens"]) == (16 * 1024, 16 * 128)
    assert out["output_throughput"] == pytest.approx(16 * 128 / out["duration"])
    assert "client_processes" not in out  # there was no client
    ops = out["simulated_ops"]
    assert sum(op["seconds"] for op in ops) == pytest.approx(out["simulated_usage"]["device"], rel=1e-6)
    assert {op["op"].split()[0] for op in ops} >= {"attention", "gate_up_swiglu", "lm_head", "sample_tokens"}
    assert next(op for op in ops if op["op"].startswith("lm_head"))["bound"] == "memory"
    page = (folder.parent / "out.html").read_text()
    assert "Where the time goes" in page
    assert "gate_up_swiglu" in page


@pytest.mark.parametrize("line", MODELS)
def test_every_line_is_simulated_from_its_config(tmp_path: Path, line: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[line][1]))
    argv = ("--max-model-len", 4096, "--num-prompts", 4, "--random-output-len", 8, "--temperature", 0)
    result = simulate(tmp_path, "--card", "H100", *argv)
    assert "Successful requests:                     4" in result.output
    measured = line == "qwen3"  # the ledger has the sizes of Qwen3-4B
    assert ("no price of lm_head" in result.stderr) is not measured


def test_an_equal_seed_gives_equal_figures(folder: Path) -> None:
    argv = ("--num-prompts", 12, "--request-rate", 20, "--seed", 3)
    first, second = simulated(folder, *argv), simulated(folder, *argv)
    for out in (first, second):
        del out["date"]
    assert first == second


MEASURED = {
    (row["row"]): row
    for line in (ROOT / "bench" / "results" / "serving.jsonl").read_text().splitlines()
    if "H100" in (row := json.loads(line))["device"]
}


@pytest.mark.parametrize("clients", [8, 32])
def test_a_served_workload_is_predicted_from_prices_that_it_took_no_part_in(
    folder: Path, clients: int
) -> None:
    row = MEASURED[str(clients)]
    out = simulated(
        folder, "--commit", "601d8d5", "--num-prompts", row["num_prompts"], "--max-concurrency", clients,
        "--seed", row["seed"], "--max-model-len", 20_000,
    )  # fmt: skip
    assert out["output_throughput"] == pytest.approx(row["output_throughput"], rel=0.05)
    assert out["median_tpot_ms"] == pytest.approx(row["median_tpot_ms"], rel=0.05)
    assert out["median_ttft_ms"] == pytest.approx(row["median_ttft_ms"], rel=0.10)


def test_quick_answers_take_several_values(folder: Path) -> None:
    lines = simulate(folder, "--card", "H100", "--ttft", 1024, "--tpot", 1, 100).output.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith(("TTFT", "TPOT"))] == [
        "TTFT of 1024 tokens", "TPOT of 1 rows at a context of 1024", "TPOT of 100 rows at a context of 1024",
    ]  # fmt: skip


def test_a_sweep_marks_the_knee(folder: Path) -> None:
    argv = ("--num-prompts", 24, "--random-output-len", 16, "--goodput", "ttft:100", "tpot:50")
    output = simulate(folder, "--card", "H100", *argv, "--sweep", "concurrency", "1:8").output
    assert output.count("knee") == 1
    assert output.count("best within the target") <= 1
    assert [line.split()[0] for line in output.splitlines()[2:]] == ["1", "2", "4", "8"]


def test_a_sweep_doubles_and_ends_at_its_bound() -> None:
    assert sweep_values(1, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert sweep_values(3, 10) == [3, 6, 10]
    assert sweep_values(5, 5) == [5]


def point(value: float, throughput: float, served: float, met: float = 1.0) -> Point:
    return Point(value, throughput, served, 1.0, 1.0, met)


def test_the_knee_is_the_last_load_that_brings_more() -> None:
    rates = [point(1, 100, 1), point(2, 200, 2), point(4, 300, 3), point(8, 310, 3.1)]
    assert knee(rates, "rate").value == 2  # at 4 a second three quarters are served
    clients = [point(1, 100, 0), point(2, 190, 0), point(4, 200, 0), point(8, 400, 0)]
    assert knee(clients, "concurrency").value == 2


def test_the_best_load_is_the_greatest_within_the_target() -> None:
    points = [point(1, 0, 0, 1.0), point(2, 0, 0, 0.96), point(4, 0, 0, 0.5)]
    found = within_target(points)
    assert found is not None
    assert found.value == 2
    assert within_target(points[2:]) is None


@pytest.mark.parametrize(
    ("sampling", "case"),
    [
        (SamplingConfig(temperature=0.0), "greedy"),
        (SamplingConfig(), "temperature 0.8"),
        (SamplingConfig(top_k=20), "top_k 40"),
        (SamplingConfig(top_p=0.5), "top_p 0.9"),
        (SamplingConfig(top_k=20, top_p=0.5), "top_k 40, top_p 0.9"),
        (SamplingConfig(min_p=0.2), "min_p 0.1"),
    ],
)
def test_sampling_takes_the_price_of_its_kind(sampling: SamplingConfig, case: str) -> None:
    assert sampling_case(sampling) == case
    assert case in REGISTRY["sample_tokens"].settings


@pytest.mark.parametrize(
    ("argv", "error", "match"),
    [
        (("--card", "TPU"), ConfigError, "no such card"),
        (("--device", "cuda"), ConfigError, "--card"),
        (("--device", "null"), UnsupportedError, "no prices"),
        (("--card", "H100", "--probe-health"), ConfigError, "--probe-health"),
        (("--card", "H100", "--commit", "0000000"), ConfigError, "no prices"),
        (("--card", "H100", "--sweep", "rate"), ConfigError, "LOW:HIGH"),
        (("--card", "H100", "--sweep", "rate", "8:2"), ConfigError, "LOW ≤ HIGH"),
        (("--card", "H100", "7"), ConfigError, "--tpot or --ttft before them"),
        (("--card", "H100", "--tpot", "1", "0"), ConfigError, "≥ 1"),
        (("--card", "H100", "--tpot", "1", "2:4"), ConfigError, "nowhere else"),
        (("--card", "H100", "rubbish"), ConfigError, "METRIC:MS"),
        (("--card", "H100", "--tpot", "0"), ConfigError, "≥ 1"),
        (("--card", "H100", "--dataset-name", "custom", "--dataset-path", "x"), ConfigError, "--tokenizer"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    folder: Path, argv: tuple[str, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        simulate(folder, *argv)


class Letters:
    """Implements bench.datasets.TextTool: a token is a letter."""

    vocab_size = 256
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def test_a_dataset_of_texts_is_tokenized() -> None:
    request = request_of(0, Sample("abc", None, 5), Letters())
    assert (unpack_tokens(request.prompt), request.sampling.max_tokens) == ([97, 98, 99], 5)
    with pytest.raises(ConfigError, match="--tokenizer"):
        request_of(0, Sample("abc", None, 5), None)
