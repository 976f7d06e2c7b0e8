"""A minimal OpenAI-like server of no engine: raw sockets, so that a test decides every byte."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

Behaviour = Callable[[socket.socket, dict[str, Any], int], bool]
JSON = "application/json"
EVENTS = "text/event-stream"


def send_whole(connection: socket.socket, status: int, body: bytes, kind: str = JSON) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def begin_stream(connection: socket.socket) -> None:
    """A chunked answer's head."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {EVENTS}\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head.encode())


def send_chunk(connection: socket.socket, data: bytes) -> None:
    connection.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\r\n\r\n"


def stream_answer(connection: socket.socket, body: dict[str, Any], number: int) -> bool:
    """As many events as tokens are asked for, each cut in two, then usage."""
    begin_stream(connection)
    most = body.get("max_tokens") or body["max_completion_tokens"]
    for i in range(most):
        finish = "length" if i == most - 1 else None
        if "messages" in body:
            choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": finish}
        else:
            choice = {"index": 0, "text": "x", "finish_reason": finish}
        data = event(choices=[choice])
        send_chunk(connection, data[:9])
        send_chunk(connection, data[9:])
    usage = {"prompt_tokens": len(body.get("prompt", "abc")), "completion_tokens": most}
    send_chunk(connection, event(choices=[], usage=usage) + b"data: [DONE]\r\n\r\n")
    connection.sendall(b"0\r\n\r\n")
    return True


class ForeignServer:
    """Serves each connection in a thread. `bodies` are the generation requests it got."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as reader:
            while self._one(connection, reader):
                pass

    def _one(self, connection: socket.socket, reader: Any) -> bool:
        """One request; False where the connection shall end."""
        head = b""
        while (line := reader.readline()) != b"\r\n":
            if not line:
                return False  # the client has hung up
            head += line
        lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        raw = reader.read(int(lengths[0].split(b":")[1])) if lengths else b""
        if head.startswith(b"GET /v1/models"):
            send_whole(connection, 200, b'{"data": [{"id": "foreign"}]}')
            return True
        if not head.startswith(b"POST"):
            send_whole(connection, 404, b"")
            return True
        body = json.loads(raw)
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.heads.append(head.decode())
        return self._behave(connection, body, number)


@contextlib.contextmanager
def foreign_server(behave: Behaviour = stream_answer) -> Iterator[ForeignServer]:
    """`behave(connection, body, number)` answers request `number` and says whether the connection goes on."""
    server = ForeignServer(behave)
    try:
        yield server
    finally:
        server.close()
