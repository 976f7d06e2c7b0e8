"""The ring of records, the file that it is written to, and `pegainfer trace explain` over that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pegainfer.cli.main import main
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.trace import STAGES
from pegainfer.observe.trace import MAX_STEPS, RingBuffer, open_folder, read_trace
from tests.null.observe.test_explain import record, step, steps_with


def ring(*, odd: bool = True) -> RingBuffer:
    """A hundred steps, one of them slow where asked for, and two requests."""
    buffer = RingBuffer("model", "device")
    buffer.steps(steps_with(50, step(50, device=0.3)) if odd else [step(i) for i in range(100)])
    buffer(record())
    buffer(record(id="second", began=1e9 + 1))
    return buffer


def test_a_file_holds_the_records_again(tmp_path: Path) -> None:
    buffer = ring()
    path = buffer.write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert read_trace(path) == buffer.trace()
    assert read_trace(path).steps[50] == step(50, device=0.3)


def test_the_events_are_those_of_the_records(tmp_path: Path) -> None:
    content = json.loads(ring(odd=False).encoded())
    events = content["traceEvents"]
    device = [e for e in events if e["ph"] == "X" and e["name"].startswith("step ")]
    assert len(device) == 100
    assert device[3]["name"] == "step 3 decode"
    assert device[3]["ts"] + device[3]["dur"] == pytest.approx((100.0 + 3 * 0.01) * 1e6)
    host = [e for e in events if e["ph"] == "X" and e["name"] in STAGES]
    assert {e["name"] for e in host} == {"schedule", "launch", "wait"}
    assert sum(e["dur"] for e in host) == pytest.approx(100 * 0.01 * 1e6)
    spans = [(e["name"], e["ph"], e["ts"]) for e in events if e.get("id") == "r"]
    assert spans[0] == ("/v1/completions", "b", 99.98e6)
    assert ("queue", "b", 99.99e6) in spans and ("queue", "e", 99.995e6) in spans
    assert ("decode", "e", 101.0e6) in spans
    begun = [e for e in events if e["ph"] == "b"]
    assert len(begun) == len([e for e in events if e["ph"] == "e"]) == 2 * 6


def test_only_the_last_are_kept_and_only_what_is_asked_for() -> None:
    buffer = ring()
    assert [s.step for s in buffer.trace(since=100.9 - 1e-6).steps] == list(range(90, 100))
    assert buffer.trace(since=101.02).requests == []
    for i in range(MAX_STEPS // 100 + 1):
        buffer.steps([step(j) for j in range(i * 100, i * 100 + 100)])
    steps = buffer.trace().steps
    assert len(steps) == MAX_STEPS and steps[-1].step == (MAX_STEPS // 100 + 1) * 100 - 1


def test_slow_requests_are_the_newest_first() -> None:
    assert ring(odd=False).slow_requests() == []
    second, first = ring().slow_requests()
    assert (second["id"], first["id"]) == ("second", "r")
    assert first["cause"] == "slow device"
    assert first["lost"] == pytest.approx(0.29)
    assert first["seconds"] == 1.03


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match="no trace; expected a file of"):
        read_trace(tmp_path / "other.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder for traces"):
        open_folder(str(tmp_path / "file" / "folder"))
    assert open_folder(str(tmp_path / "new" / "folder")).is_dir()


def test_explain_names_the_cause_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ring().write(tmp_path))
    assert main(["trace", "explain", path]) == 1
    said = capsys.readouterr().out
    assert said.startswith("model on device: 2 requests, 100 steps\n")
    (row,) = [line for line in said.splitlines() if line.startswith("slow device  ")]
    assert row.split() == ["slow", "device", "0.580", "28.2%", "2"]
    assert "slow device: step 50 took the device 300.0 ms, its price is 10.0 ms (request r, 1.030 s)" in said
    assert main(["trace", "explain", path, "--threshold", "0.3"]) == 0


def test_explain_of_a_trace_without_slow_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "explain", str(ring(odd=False).write(tmp_path))]) == 0
    assert "nothing held these requests up" in capsys.readouterr().out


def test_explain_one_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ring().write(tmp_path))
    assert main(["trace", "explain", path, "--request", "second"]) == 1
    said = capsys.readouterr().out
    assert "request second: /v1/completions, 1.030 s" in said
    assert "decode                       0.980 s   95.1%" in said
    assert "slow device, 0.290 s: step 50" in said
    assert main(["trace", "explain", path, "--request", "cmpl-second"]) == 1  # as clients see the id
    assert main(["trace", "explain", path, "--request", "third"]) == 2
    assert "no such request in the trace; expected one of 2, such as ['r', 'second']; got third" in (
        capsys.readouterr().err
    )
    assert main(["trace", "explain", path, "--threshold", "2"]) == 2
