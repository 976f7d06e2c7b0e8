"""`pegainfer serve` as processes: start, answer, drain, and every way to end. On the null device."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.support.default_model import default_model
from tests.support.server import END_SECONDS, Server, pega, serving


def ended(pid: int) -> bool:
    """Waits for a process that is not our child; True if it ended within a minute."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60.0)[0])
    finally:
        os.close(descriptor)


def open_stream(server: Server, max_tokens: int) -> http.client.HTTPResponse:
    """A running completion whose first chunk has come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": "hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return response


def test_it_answers_and_says_what_it_started() -> None:
    with serving("--device", "null", "--served-model-name", "a", "--served-model-name", "b") as server:
        assert "null on null" in server.said[0]
        assert server.said[1].startswith("ready after ")
        body = {"prompt": "hello", "max_tokens": 8, "model": "b", "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
        assert answer["model"] == "a"
        assert answer["usage"]["completion_tokens"] == 8
        for route in ("/health", "/ready", "/version", "/metrics"):
            assert httpx.get(server.url + route).status_code == 200
        assert server.stop() == 0
        assert server.errors.read_text() == ""


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("", True),
        ("--no-page", False),
        ("--api-key k", False),
        ("--api-key k --open-page", True),
        ("--admin-key k", True),
    ],
)
def test_it_says_that_there_is_a_page_where_a_browser_gets_one(flags: str, shown: bool) -> None:
    with serving("--device", "null", *flags.split()) as server:
        assert (httpx.get(server.url).status_code == 200) is shown
        assert (httpx.get(server.url + "/dashboard").status_code == 200) is shown
        assert server.stop() == 0
        assert server.process.stdout is not None
        after = server.process.stdout.read()
    page = "open it in a browser to talk to the model; /dashboard shows what the server does\n"
    assert after == (page if shown else "")


def test_flags_reach_the_engine() -> None:
    with serving("--device", "null", "--max-model-len", "64", "--max-num-seqs", "3") as server:
        assert "3 sequences of up to 64 tokens" in server.said[0]
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 65, "max_tokens": 1})
        assert answer.status_code == 400
        assert "64" in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(number: int) -> None:
    with serving("--device", "null") as server:
        (engine,) = server.children()
        response = open_stream(server, max_tokens=3000)
        server.process.send_signal(number)
        rest = response.read()
        assert rest.rstrip().endswith(b"data: [DONE]")
        assert b'"finish_reason":"length"' in rest
        assert server.process.wait(60) == 0
        assert ended(engine)


def test_an_engine_that_dies_ends_the_server_where_none_may_replace_it() -> None:
    with serving("--device", "null", "--engine-restarts", "0") as server:
        (engine,) = server.children()
        response = open_stream(server, max_tokens=4000)
        os.kill(engine, signal.SIGKILL)
        rest = response.read()
        assert b"the engine process has ended; got signal 9 (SIGKILL); remedy: restart the server" in rest
        assert server.process.wait(60) == 1
        errors = server.errors.read_text()
        assert "the engine process has failed; got signal 9 (SIGKILL)" in errors


def until_alive(server: Server) -> None:
    """Waits for a new engine; until then each answer of /health must be a 503 with the reason."""
    while (health := httpx.get(f"{server.url}/health")).status_code != 200:
        assert health.status_code == 503
        assert "signal 9" in health.json()["error"]["message"]
        assert health.headers["retry-after"]


@pytest.mark.parametrize("kills", [3])
def test_a_dead_engine_is_replaced_and_only_what_was_in_flight_fails(kills: int) -> None:
    with serving("--device", "null", "--engine-restarts", str(kills)) as server:
        body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
        first = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"]
        for _ in range(kills):
            (engine,) = server.children()
            response = open_stream(server, max_tokens=4000)
            os.kill(engine, signal.SIGKILL)
            assert b"got signal 9 (SIGKILL); remedy: try again when a new one is ready" in response.read()
            refused = httpx.post(f"{server.url}/v1/completions", json=body)
            assert refused.status_code in (200, 503)  # 200: the new one was quick
            until_alive(server)
            assert httpx.get(f"{server.url}/ready").status_code == 200
            again = httpx.post(f"{server.url}/v1/completions", json=body)
            assert again.status_code == 200 and again.json()["choices"] == first
        assert server.errors.read_text().count("a new engine is ready") == kills
        (engine,) = server.children()
        assert server.stop() == 0
        assert ended(engine)


def test_the_last_death_ends_the_server() -> None:
    with serving("--device", "null") as server:  # one restart
        for last in (False, True):
            (engine,) = server.children()
            response = open_stream(server, max_tokens=4000)
            os.kill(engine, signal.SIGKILL)
            assert b"signal 9" in response.read()
            if not last:
                until_alive(server)
        assert server.process.wait(60) == 1
        logged = server.errors.read_text().splitlines()
        assert len([line for line in logged if line.startswith("ERROR pegainfer.cli.supervisor")]) == 2


def test_an_engine_that_cannot_be_replaced_is_a_failure_of_the_server(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to(default_model())
    with serving(str(link)) as server:
        link.unlink()
        os.kill(server.children()[0], signal.SIGKILL)
        assert server.process.wait(END_SECONDS) == 1
        said = server.errors.read_text()
    assert "a new engine could not be started: cannot read weights file" in said
    assert "pegainfer: error: the engine process has ended, and no new one could be started" in said


def test_the_engine_ends_when_the_front_is_killed() -> None:
    with serving("--device", "null") as server:
        (engine,) = server.children()
        server.stop(signal.SIGKILL)
        assert ended(engine)


def test_a_taken_port_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = pega("serve", "--device", "null", "--port", port)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"pegainfer: error: the port is taken; at --host 127.0.0.1 --port {port}; "
        "remedy: stop its owner, or choose another --port\n"
    )


def runs_engine(pid: int) -> bool:
    """Whether a child has become an engine: before, it shares its parent's memory and must not be stopped."""
    return b"pegainfer.cli.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_pending(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("ShdPnd:")[1].split()[0], 16) >> (number - 1) & 1)


def test_a_signal_while_a_new_engine_loads_ends_the_server_at_once() -> None:
    with serving("--device", "null") as server:
        (engine,) = server.children()
        response = open_stream(server, max_tokens=4000)
        os.kill(engine, signal.SIGKILL)
        assert b"signal 9" in response.read()
        while not (loading := [pid for pid in server.children() if runs_engine(pid) and pid != engine]):
            pass
        os.kill(loading[0], signal.SIGSTOP)  # it gets ready no sooner than it is told to end
        server.process.send_signal(signal.SIGTERM)
        while not is_pending(loading[0], signal.SIGTERM):
            pass
        os.kill(loading[0], signal.SIGCONT)
        assert server.process.wait(END_SECONDS) == 0
        assert "new engine is ready" not in server.errors.read_text()


def test_the_console_says_why_a_request_was_refused() -> None:
    with serving("--device", "null", "--api-key", "secret") as server:
        key = {"Authorization": "Bearer secret"}
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "top_p": 7}, headers=key)
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert httpx.get(f"{server.url}/health").status_code == 200
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(b"\x16\x03\x01\r\n\r\n")
            raw.settimeout(30)
            assert b"400 Bad Request" in raw.recv(4096)
        assert server.stop() == 0
        lines = server.errors.read_text().splitlines()
    assert lines == [
        "WARNING pegainfer.requests: 400 POST /v1/completions from 127.0.0.1: top_p: expected 0 < top_p "
        "≤ 1, got 7.0",
        "WARNING pegainfer.requests: 401 POST /v1/completions from 127.0.0.1: Authorization: expected "
        "'Bearer <key>' (or x-api-key: <key>) with a known key",
        "WARNING pegainfer.requests: 400 from 127.0.0.1: not an HTTP/1.1 request",
    ]
