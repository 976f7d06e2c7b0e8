"""The server process: signals, sockets, and what happens when its engine dies."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server import Server, serving

NULL = ("--device", "null")
LONG = {"prompt": "abc", "ignore_eos": True, "max_tokens": 3000}


@contextlib.contextmanager
def frozen_engine(server: Server) -> Iterator[psutil.Process]:
    """The engine's process stands still, as in a step that takes long, until the context ends."""
    engine = psutil.Process(*server.children())
    engine.suspend()
    try:
        yield engine
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.resume()


def wait_until(condition: Callable[[], bool]) -> None:
    """Asks again and again; the test's own timeout ends it."""
    while not condition():
        pass


def raw(server: Server, data: bytes) -> bytes:
    """All that the server answers to these bytes until it hangs up."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 80), timeout=30) as sock:
        with contextlib.suppress(OSError):  # it may hang up before it has read everything
            sock.sendall(data)
        out = b""
        with contextlib.suppress(ConnectionResetError):
            while more := sock.recv(65536):
                out += more
        return out


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--max-header-bytes", "4096", "--header-seconds", "0.3", "--max-body-bytes", "100000")
    with serving(*NULL, *flags, "--keep-alive-seconds", "0.05") as process:
        yield process


def test_a_silent_engine_keeps_health_green_and_streams_alive(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as http, frozen_engine(server) as engine:
        with http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 5, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
            assert httpx.get(server.url + "/health").status_code == 200
            engine.resume()
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert len("".join(json.loads(d[6:])["choices"][0]["text"] for d in rest[:-1])) == 5


def test_headers_are_bounded(server: Server) -> None:
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert raw(server, line + b"X: " + b"a" * 3500 + b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    for flood in (
        line + b"X: " + b"a" * 5000 + b"\r\n\r\n",
        line + b"X: y\r\n" * 1000 + b"\r\n",
        line + b"X: " + b"a" * 3_000_000,  # never ends
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        answer = raw(server, flood)
        assert answer.startswith(b"HTTP/1.1 431"), answer[:100]
        error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
        assert "≤ 4096 bytes" in error["message"]
    assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x00\x01\x02\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_what_is_not_http_is_a_400(server: Server, data: bytes) -> None:
    answer = raw(server, data)
    assert answer.startswith(b"HTTP/1.1 400"), answer[:100]
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("data", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_header_that_never_ends_is_given_up(server: Server, data: bytes) -> None:
    assert raw(server, data) == b""


def test_a_body_too_large_is_a_413_before_it_is_sent(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
    assert raw(server, head).startswith(b"HTTP/1.1 413")
    chunks = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + (b"4000\r\n" + b" " * 0x4000 + b"\r\n") * 7
    )
    assert raw(server, chunks).startswith(b"HTTP/1.1 413")


def test_two_hundred_clients_leave_in_a_row(server: Server) -> None:
    def load() -> dict[str, int]:
        body: dict[str, int] = http.get("/load").json()
        return body

    with httpx.Client(base_url=server.url, timeout=30) as http:
        before = load()
        for _ in range(200):
            with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
                next(stream.iter_bytes())
        wait_until(
            lambda: not any(load()[k] for k in ("running", "waiting", "server_load", "queued_requests"))
        )
        # Blocks come back when the last plan that uses them has ended, which may be after the last request.
        wait_until(lambda: load()["free_blocks"] == before["free_blocks"])
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_metrics_of_a_real_engine(server: Server) -> None:
    httpx.post(server.url + "/v1/completions", json={"prompt": "x" * 40, "max_tokens": 3, "ignore_eos": True})
    page = httpx.get(server.url + "/metrics").text
    for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total"):
        (line,) = [x for x in page.splitlines() if x.startswith(f"pegainfer:{name}{{")]
        assert float(line.split()[-1]) > 0


def test_sigterm_lets_running_requests_finish() -> None:
    with serving(*NULL) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        with frozen_engine(server) as engine, httpx.Client(base_url=server.url, timeout=30) as other:
            request = other.build_request("POST", "/v1/completions", json={**LONG, "stream": True})
            with contextlib.closing(_Background(other, request)) as running:
                wait_until(lambda: http.get("/load").json()["server_load"] == 1)
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: http.get("/ready").status_code == 503)
                refused = http.post("/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503
                assert "retry-after" in refused.headers
                assert http.get("/health").status_code == 200
                engine.resume()
                answer = running.result()
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in answer.text
        assert server.process.wait(60) == 0
        assert server.errors.read_text().splitlines() == [
            "ERROR pegainfer.requests: 503 POST /v1/completions from 127.0.0.1: the server is shutting down"
        ]
        with pytest.raises(httpx.ConnectError):
            http.get("/health")


def test_a_second_signal_does_not_wait() -> None:
    with serving(*NULL) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        with frozen_engine(server) as engine, httpx.Client(base_url=server.url, timeout=30) as other:
            request = other.build_request("POST", "/v1/completions", json=LONG)
            with contextlib.closing(_Background(other, request)) as running:
                wait_until(lambda: http.get("/load").json()["server_load"] == 1)
                server.process.send_signal(signal.SIGINT)
                wait_until(lambda: http.get("/ready").status_code == 503)
                server.process.send_signal(signal.SIGINT)
                assert running.result().status_code == 503
                engine.resume()
        assert server.process.wait(60) == 1
        assert "Traceback" not in server.errors.read_text()


def test_a_killed_engine_ends_what_ran_and_the_server() -> None:
    flags = (*NULL, "--engine-restarts", "0")
    with serving(*flags) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        with frozen_engine(server) as engine, httpx.Client(base_url=server.url, timeout=30) as other:
            request = other.build_request("POST", "/v1/completions", json=LONG)
            with contextlib.closing(_Background(other, request)) as running:
                wait_until(lambda: http.get("/load").json()["server_load"] == 1)
                engine.kill()
                answer = running.result()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert server.process.wait(60) == 1
        assert "the engine process has failed" in server.errors.read_text()


def test_keys_close_the_server() -> None:
    with serving(*NULL, "--api-key", "one", PEGAINFER_API_KEY="two") as server:
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/v1/models").status_code == 401
        headers = {"Authorization": "Bearer two"}
        assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200


class _Background:
    """A request that is answered on a thread of its own."""

    def __init__(self, http: httpx.Client, request: httpx.Request) -> None:
        import concurrent.futures

        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._future: Any = self._pool.submit(http.send, request)

    def result(self) -> httpx.Response:
        answer: httpx.Response = self._future.result(30)
        return answer

    def close(self) -> None:
        self._pool.shutdown()
