"""`pegainfer bench serve` against our own server on the null device."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import Server, pega, pega_here, serving

LENGTHS = ("--random-input-len", "32", "--random-output-len", "8", "--ignore-eos")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--device", "null") as running:
        yield running


def bench(server: Server, folder: Path, *flags: str) -> dict[str, Any]:
    where = ["--port", str(server.port), "--save-result", "--save-detailed", "--result-dir", str(folder)]
    done = pega_here("bench", "serve", *where, "--result-filename", "r.json", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "r.json").read_text())


def test_random_counts_are_what_the_server_counted(server: Server, tmp_path: Path) -> None:
    # The server is shared: with a seed of its own no prompt is in the prefix cache yet.
    flags = ("--max-concurrency", "8", "--probe-health", "--seed", "40")
    result = bench(server, tmp_path, "--num-prompts", "40", *LENGTHS, *flags)
    assert (result["completed"], result["failed"]) == (40, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40 * 32, 40 * 8)
    assert result["model_id"] == "null"
    assert result["health_failed"] == 0
    assert result["server_steps"] >= 8
    assert {"schedule", "launch", "tokenize", "detokenize"} <= set(result["server_host_seconds"])
    assert all(seconds >= 0 for seconds in result["server_host_seconds"].values())
    assert result["server_host_seconds"]["schedule"] > 0 and result["server_cached_share"] == 0
    assert 1 <= result["max_concurrent_requests"] <= 8
    for i in range(40):
        assert 0 < result["ttfts"][i] <= result["latencies"][i]
        assert result["ttfts"][i] + sum(result["itls"][i]) == pytest.approx(result["latencies"][i])
    assert result["request_throughput"] == pytest.approx(40 / result["duration"])


def test_answers_that_are_not_streamed(server: Server, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--num-prompts", "20", *LENGTHS, "--no-stream-response")
    assert (result["completed"], result["total_output_tokens"]) == (20, 160)
    assert result["mean_e2el_ms"] > 0 and "mean_ttft_ms" not in result


def test_one_seed_sends_the_same(server: Server, tmp_path: Path) -> None:
    flags = ("--num-prompts", "6", *LENGTHS, "--temperature", "0", "--random-range-ratio", "0.5")
    first, again = bench(server, tmp_path, *flags), bench(server, tmp_path, *flags)
    other = bench(server, tmp_path, *flags, "--seed", "1")
    for key in ("input_lens", "output_lens", "generated_texts"):
        assert first[key] == again[key]
    assert first["generated_texts"] != other["generated_texts"]


def test_requests_do_not_go_out_before_their_time(server: Server, tmp_path: Path) -> None:
    rows = [
        {"timestamp": t, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]} for t in (0, 150, 300)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--ignore-eos")
    result = bench(server, tmp_path, *flags, "--timed-trace-sec-multiplier", "0.001")
    starts = [start - result["start_times"][0] for start in result["start_times"]]
    # The first may be late by a little, and then the gaps are shorter by as much.
    late = result["queue_times"][0]
    assert starts[1] >= 0.15 - late and starts[2] >= 0.3 - late
    assert result["total_input_tokens"] == 60 and result["output_lens"] == [3, 3, 3]


def test_warm_ups_are_not_counted(server: Server, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--num-prompts", "3", *LENGTHS, "--num-warmups", "2")
    assert result["completed"] == 3 and len(result["latencies"]) == 3


def test_values_of_one_flag_may_be_separated_by_spaces(server: Server, tmp_path: Path) -> None:
    goals = ("--goodput", "ttft:60000", "e2el:60000", "--metadata", "tp=1", "note=x:y", "--label", "mine")
    result = bench(server, tmp_path, "--num-prompts", "3", *LENGTHS, *goals, "--append-result")
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert (result["tp"], result["note"], result["label"]) == ("1", "x:y", "mine")


def test_the_page_is_saved_beside_the_result(server: Server, tmp_path: Path) -> None:
    bench(server, tmp_path, "--num-prompts", "5", *LENGTHS, "--plot-timeline")
    text = (tmp_path / "r.html").read_text()
    assert text.startswith("<!doctype html>") and text.count("<g><title>request ") == 5


def test_a_prompt_too_long_is_a_failure_with_the_servers_reason(server: Server) -> None:
    done = pega(
        "bench", "serve", "--port", str(server.port), "--num-prompts", "2", "--random-input-len", "9999"
    )
    assert done.returncode == 1
    assert (
        "failed: 2 × HTTP 400: This model's maximum context length is 4096 tokens: expected ≤ 4095 tokens"
        in done.stderr
    )


def test_the_command_as_a_process(server: Server) -> None:
    done = pega("bench", "serve", "--port", str(server.port), "--num-prompts", "2", *LENGTHS)
    assert done.returncode == 0
    assert "Total generated tokens:                  16" in done.stdout


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "no server answers"),
        (("--base-url", "ftp://host"), "--base-url"),
        (("--dataset-name", "custom"), "--dataset-path"),
        (("--request-rate", "0"), "--request-rate"),
        (("--goodput", "speed:3"), "--goodput"),
        (("tp=1",), "--metadata before them"),
        (("word",), "got word"),
        (("--tokenizer", "/no/such/model.gguf"), "/no/such/model.gguf"),
        (("--header", "nothing"), "--header"),
    ],
)
def test_what_the_user_can_cure_is_one_line(flags: tuple[str, ...], said: str) -> None:
    done = pega_here("bench", "serve", "--port", str(closed_port()), *flags)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("pegainfer: error: ")
    assert said in done.stderr
