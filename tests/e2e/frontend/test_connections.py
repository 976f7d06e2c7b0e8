"""What clients do with a connection: old ones, hasty ones, odd ones, and those that mean harm."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import struct
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support.server import Server, serving

BODY = b'{"prompt": "abc", "max_tokens": 3, "ignore_eos": true, "stream": true}'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--header-seconds", "0.5", "--write-seconds", "0.5", "--max-header-bytes", "4096")
    with serving("--device", "null", *flags) as process:
        yield process


@pytest.fixture(autouse=True)
def sound(server: Server) -> Iterator[None]:
    """After each of them the server serves."""
    yield
    with httpx.Client(base_url=server.url, timeout=30) as http:
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 3
        while any((load := http.get("/load").json())[k] for k in ("running", "waiting", "server_load")):
            pass
        assert load["queued_requests"] == 0
    assert "Traceback" not in server.errors.read_text()


@contextlib.contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        yield sock


def rest(sock: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    out = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(65536):
            out += more
    return out


def raw(server: Server, data: bytes, *, half_close: bool = False) -> bytes:
    with connected(server) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        return rest(sock)


def post(path: str = "/v1/completions", body: bytes = BODY, version: str = "1.1", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def aborted(server: Server) -> int:
    """Continuations that were ended before their end."""
    text = httpx.get(server.url + "/metrics", timeout=30).text
    found = re.search(r'request_success_total\{.*finished_reason="abort".*\} (\S+)', text)
    return int(float(found[1])) if found else 0


def test_http_1_0_gets_its_answers_unchunked(server: Server) -> None:
    head, _, body = raw(server, post(version="1.0")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"chunked" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")
    plain = post(body=BODY.replace(b"true}", b"false}"), version="1.0")
    head, _, body = raw(server, plain).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert json.loads(body)["usage"]["completion_tokens"] == 3
    assert raw(server, b"GET /health HTTP/1.0\r\n\r\n").endswith(b'{"status":"ok"}')


def test_requests_sent_ahead_are_answered_in_order(server: Server) -> None:
    close = "Connection: close\r\n"
    ahead = b"GET /version HTTP/1.1\r\nHost: x.localhost\r\n\r\n" + post() + post(headers=close)
    answer = raw(server, ahead)
    assert answer.count(b"HTTP/1.1 200") == 3 and answer.count(b"data: [DONE]") == 2
    assert answer.index(b'"version"') < answer.index(b"[DONE]")


def test_requests_sent_ahead_are_bounded(server: Server) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before = psutil.Process(server.process.pid).memory_info().rss
    with connected(server) as sock:
        sock.settimeout(30)
        with contextlib.suppress(OSError):
            for _ in range(200):
                sock.sendall(one * 2000)  # 18 MB of them, and nothing is read
    assert psutil.Process(server.process.pid).memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    "after", [b"\0no request\r\n\r\n", b"GET /hea", b"GET /health HTTP/1.1\r\nX: " + b"y" * 70_000]
)
def test_what_follows_a_request_does_not_disturb_its_answer(server: Server, after: bytes) -> None:
    """A request that is broken, or not whole within the time: the answer before it ends the connection."""
    body = BODY.replace(b"3,", b"4000, ").replace(b"}", b', "n": 4}')
    with connected(server) as sock:
        sock.sendall(post(body=body))
        answer = sock.recv(1)
        with contextlib.suppress(OSError):
            sock.sendall(after)
        answer += rest(sock)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(re.findall(rb"HTTP/1.1 \d", answer)) == 1


def test_who_leaves_with_requests_sent_ahead_ends_the_one_under_way(server: Server) -> None:
    before = aborted(server)
    with connected(server) as sock:
        sock.sendall(post(body=BODY.replace(b"3,", b"4000, ").replace(b"}", b', "n": 16}')) + post())
        assert sock.recv(1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    with httpx.Client(base_url=server.url, timeout=30) as http:
        while (load := http.get("/load").json())["running"] or load["server_load"]:
            pass
    assert "Traceback" not in server.errors.read_text()
    assert aborted(server) >= before + 16


@pytest.mark.parametrize("ahead", [1, 2])
def test_who_hangs_up_with_requests_sent_ahead_is_noticed(server: Server, ahead: int) -> None:
    """Though nothing is written to it meanwhile."""
    before = aborted(server)
    with connected(server) as sock:
        long = BODY.replace(b"3,", b"4000, ").replace(b"true}", b'false, "n": 16}')
        sock.sendall(post(body=long) + post() * ahead)
        with httpx.Client(base_url=server.url, timeout=30) as http:
            while not http.get("/load").json()["running"]:
                pass
    with httpx.Client(base_url=server.url, timeout=30) as http:
        while (load := http.get("/load").json())["running"] or load["server_load"]:
            pass
    assert aborted(server) == before + 16


def test_trailers_are_forgotten(server: Server) -> None:
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n"
    )
    assert b"[DONE]" in raw(server, chunked + b"Authorization: Bearer x\r\nX: y\r\n\r\n")
    before = psutil.Process(server.process.pid).memory_info().rss
    with connected(server) as sock:
        sock.sendall(chunked)
        for _ in range(300):
            sock.sendall(b"X: " + b"y" * 100_000 + b"\r\n")  # 30 MB that never end
        grown = psutil.Process(server.process.pid).memory_info().rss - before
    assert grown < 16 << 20


@pytest.mark.parametrize(
    "upgrade", ["h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA", "websocket\r\nSec-WebSocket-Version: 13"]
)
def test_another_protocol_is_not_taken_up(server: Server, upgrade: str) -> None:
    """As curl --http2 and Java's client offer by themselves; the connection goes on in HTTP/1.1."""
    offer = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {upgrade}\r\n"
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    chunked += offer.encode() + b"\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + offer.encode() + b"\r\n"
    data = post(headers=offer) + get + chunked + post(headers="Connection: close\r\n")
    for cut in (len(data), 30, len(post(headers=offer)) - 5):
        with connected(server) as sock:
            sock.sendall(data[:cut])
            sock.sendall(data[cut:])
            answer = rest(sock)
        assert answer.count(b"HTTP/1.1 200") == 4 and answer.count(b"[DONE]") == 3, cut


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://anything.example/health HTTP/1.1", b"200"),
        (b"GET /health?x=%00%ff%ED%A0%80 HTTP/1.1", b"200"),
        (b"HEAD /health HTTP/1.1", b"200"),
        (b"HEAD / HTTP/1.1", b"200"),
        (b"HEAD /v1/models HTTP/1.1", b"200"),
        (b"OPTIONS /v1/completions HTTP/1.1", b"405"),
        (b"OPTIONS * HTTP/1.1", b"4"),
        (b"CONNECT evil.example:443 HTTP/1.1", b"4"),
        (b"TRACE /health HTTP/1.1", b"405"),
        (b"PROPFIND /health HTTP/1.1", b"405"),
        (b"BREW /health HTTP/1.1", b"400"),
        (b"GET /v1/responses/%00%ff%ED%A0%80 HTTP/1.1", b"404"),
        (b"GET /v1/models/\xc3\xa9 HTTP/1.1", b"40"),
        (b"GET /v1/models/%C3%A9%2F..%2F.. HTTP/1.1", b"404"),
        (b"GET //evil.example/%2e%2e/ HTTP/1.1", b"404"),
        (b"GET /static/..%2f..%2fapp.py HTTP/1.1", b"404"),
        (b"GET  HTTP/1.1", b"400"),
        (b"PRI * HTTP/2.0", b"4"),
    ],
)
def test_lines_of_requests(server: Server, line: bytes, status: bytes) -> None:
    answer = raw(server, line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"" if line.startswith(b"HEAD") else b"application/json" in head


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"X y: z\r\n",
        b": z\r\n",
    ],
)
def test_what_proxies_could_read_otherwise_is_a_400(server: Server, head: bytes) -> None:
    line = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    answer = raw(
        server, line + head + b"\r\n" + b"0\r\n\r\n" + b"GET /health HTTP/1.1\r\n\r\n", half_close=True
    )
    assert answer.startswith(b"HTTP/1.1 400"), answer[:200]
    assert len(re.findall(rb"HTTP/1.1 \d", answer)) == 1


def test_a_client_that_asks_before_it_sends(server: Server) -> None:
    with connected(server) as sock:
        head, _, body = post(headers="Expect: 100-continue\r\nConnection: close\r\n").partition(b"\r\n\r\n")
        sock.sendall(head + b"\r\n\r\n")
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert b"[DONE]" in rest(sock)
    # What is refused is refused before it is sent.
    big = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    assert raw(server, big + b"Content-Length: 99999999\r\n\r\n").startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("before", [b"\r\n", b"\r\n\r\n\r\n"])
def test_a_connection_that_says_nothing_is_given_up_after_an_answer_too(
    server: Server, before: bytes
) -> None:
    with connected(server) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += sock.recv(65536)
        sock.sendall(before)
        assert rest(sock) == b""


def test_a_body_that_nobody_waits_for_does_not_keep_a_connection(server: Server) -> None:
    with connected(server) as sock:
        sock.sendall(b"POST /no/such HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx")
        answer = b""
        while not answer.endswith(b"}}"):
            answer += sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 404")
        sock.sendall(b"x")
        assert rest(sock) == b""


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
def test_an_answer_that_nobody_fetches_is_dropped(server: Server, close: bytes) -> None:
    connections = psutil.Process(server.process.pid).net_connections
    with connected(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own = sock.getsockname()[1]
        body = json.dumps({"prompt": "a" * 1_000_000, "return_token_strs": True}).encode()
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + close + b"Content-Length: %d\r\n\r\n"
        sock.sendall(head % len(body) + body)
        while any(c.raddr and c.raddr.port == own and c.status == "ESTABLISHED" for c in connections()):
            pass


def test_a_stream_that_nobody_reads_is_dropped_with_its_connection(server: Server) -> None:
    connections = psutil.Process(server.process.pid).net_connections
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        own = sock.getsockname()[1]
        sock.sendall(post(body=BODY.replace(b"3,", b"4000, ").replace(b"}", b', "n": 16, "logprobs": 5}')))
        while any(c.raddr and c.raddr.port == own and c.status == "ESTABLISHED" for c in connections()):
            pass
    assert "ERROR" not in server.errors.read_text()


def test_a_client_that_half_closes_has_left(server: Server) -> None:
    long = BODY.replace(b"3,", b"3000,")
    assert b"[DONE]" not in raw(server, post(body=long), half_close=True)


def test_more_connections_than_a_shell_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        with serving("--device", "null") as small, contextlib.ExitStack() as stack:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for _ in range(100):
                stack.enter_context(connected(small))
            assert httpx.get(small.url + "/health", timeout=30).status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_many_clients_that_send_slowly_harm_nobody(server: Server) -> None:
    paths = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
    with contextlib.ExitStack() as stack:
        for i in range(100):
            sock = stack.enter_context(connected(server))
            sock.sendall(post(paths[i % len(paths)])[:-1])
        threads = [threading.Thread(target=httpx.get, args=(server.url + "/health",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=30)
        assert answer.status_code == 200
