"""`serve --trace` with a real engine process: what is recorded crosses the socket and ends in the file."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from pegainfer.cli.main import main
from pegainfer.observe.trace import read_trace
from tests.support.server import serving


def complete(url: str, tokens: int) -> None:
    body = {"prompt": "a prompt", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200


def test_a_served_trace(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    with serving("--device", "null", "--trace", str(folder)) as server:
        complete(server.url, 20)
        complete(server.url, 30)
        assert server.stop() == 0
        assert server.process.stdout is not None
        said = server.process.stdout.read()
    (path,) = folder.iterdir()
    assert f"trace written to {path}" in said
    trace = read_trace(path)
    assert (trace.model, trace.device) == ("null", "null")
    assert [r.completion_tokens for r in trace.requests] == [20, 30]
    assert [s.step for s in trace.steps] == list(range(1, len(trace.steps) + 1))
    assert len(trace.steps) >= 50
    assert main(["trace", "explain", str(path), "--threshold", "1"]) == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = main(["serve", "--device", "null", "--port", "0", "--trace", str(tmp_path / "file" / "x")])
    assert code == 2
