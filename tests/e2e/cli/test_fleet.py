"""`pegainfer serve A B` as processes, on the null device: one engine a model, and faults of one alone."""

from __future__ import annotations

import json
import os
import signal
import time

import httpx

from tests.e2e.cli.test_serve import ended, open_stream
from tests.support.server import serving

NULL = ("--device", "null")


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_an_engine_for_each_model_that_is_used() -> None:
    with serving("a", "b", *NULL, "--admin-key", "k") as server:
        assert "2 models" in server.said[0] and server.said[1:3] == ["  a", "  b"]
        assert ask(server.url, "a").json()["model"] == "a"
        (first,) = server.children()
        assert ask(server.url, "b").json()["model"] == "b"
        assert len(server.children()) == 2
        stream = open_stream(server, 3000)  # of the first model
        body, headers = {"model": "a"}, {"authorization": "Bearer k"}
        unloading = f"{server.url}/admin/models/unload"
        assert httpx.post(unloading, json=body, headers=headers, timeout=60).json()["loaded"] is False
        chunks = [line for line in stream.read().split(b"\n") if line.startswith(b"data: {")]
        assert json.loads(chunks[-1][6:])["choices"][0]["finish_reason"] == "length"  # nothing was lost
        assert ended(first)
        assert ask(server.url, "a").status_code == 200  # loaded again
        children = server.children()
        assert server.stop() == 0
    assert all(ended(child) for child in children)


def test_an_engine_that_is_killed_takes_nothing_else_along() -> None:
    with serving("a", "b", *NULL) as server:
        assert ask(server.url, "a").status_code == 200
        (engine,) = server.children()
        assert ask(server.url, "b").status_code == 200
        (other,) = set(server.children()) - {engine}
        stream = open_stream(server, 3000)  # of the first model
        os.kill(other, signal.SIGKILL)
        assert ended(other)
        deadline = time.monotonic() + 60
        while (answer := ask(server.url, "b")).status_code == 503 and time.monotonic() < deadline:
            assert answer.json()["error"]["code"] == "engine_dead"
        assert answer.json()["model"] == "b"
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert engine in server.children()
        assert server.stop() == 0
        assert "signal 9 (SIGKILL)" in server.errors.read_text()
