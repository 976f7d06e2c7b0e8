"""The load client against a server that is not ours, and that misbehaves."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign_server import (
    EVENTS,
    Behaviour,
    begin_stream,
    event,
    foreign_server,
    send_chunk,
    send_whole,
    stream_answer,
)
from tests.support.server import pega_here


def bench(port: int, folder: Path, *flags: str) -> tuple[dict[str, Any], str, str]:
    """One run's saved result, and what was printed."""
    where = ["--port", str(port), "--save-result", "--save-detailed", "--result-dir", str(folder)]
    done = pega_here("bench", "serve", *where, "--result-filename", "r.json", *flags)
    path = folder / "r.json"
    assert path.exists(), done.stderr
    return json.loads(path.read_text()), done.stdout, done.stderr


def test_counts_of_a_foreign_server_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with foreign_server() as server:
        flags = ("--num-prompts", "9", "--random-input-len", "12", "--random-output-len", "5")
        more = ("--max-concurrency", "3", "--client-processes", "2", "--temperature", "0")
        result, out, err = bench(server.port, tmp_path, *flags, *more)
        assert err == "" or err.startswith("note: the client's timers")
    assert (result["completed"], result["failed"]) == (9, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (9 * 12, 9 * 5)
    assert result["output_lens"] == [5] * 9 and result["input_lens"] == [12] * 9
    assert [len(itls) for itls in result["itls"]] == [4] * 9
    assert result["generated_texts"] == ["xxxxx"] * 9
    assert result["model_id"] == "foreign" and result["client_processes"] == 2
    assert result["max_concurrent_requests"] <= 3
    assert "Successful requests:                     9" in out
    assert len(server.bodies) == 9
    for body in server.bodies:
        assert body["model"] == "foreign" and body["max_tokens"] == 5 and body["temperature"] == 0.0
        assert len(body["prompt"]) == 12 and body["stream_options"] == {"include_usage": True}
        assert "ignore_eos" not in body
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 9
    assert all("Authorization: Bearer secret\r\n" in head for head in server.heads)


def test_chat_and_names(tmp_path: Path) -> None:
    with foreign_server() as server:
        flags = ("--backend", "openai-chat", "--num-prompts", "3", "--random-output-len", "4")
        more = (
            "--model",
            "org/m",
            "--served-model-name",
            "m",
            "--random-input-len",
            "3",
            "--header",
            "x-a=b",
        )
        result, _, _ = bench(server.port, tmp_path, *flags, *more, "--extra-body", '{"top_k": 3}')
    assert result["completed"] == 3 and result["total_output_tokens"] == 12
    assert result["model_id"] == "org/m"
    (body, *_) = server.bodies
    assert body["model"] == "m" and body["top_k"] == 3 and body["max_completion_tokens"] == 4
    assert body["messages"][0]["role"] == "user"
    assert server.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "x-a: b\r\n" in server.heads[0]


def cut(connection: socket.socket, body: dict[str, Any], number: int) -> bool:
    """Hangs up in the middle of the stream."""
    begin_stream(connection)
    send_chunk(connection, event(choices=[{"index": 0, "text": "x", "finish_reason": None}]))
    return False


def refuse(connection: socket.socket, body: dict[str, Any], number: int) -> bool:
    send_whole(connection, 503, b'{"error": {"message": "the queue is full"}}')
    return True


def hang(connection: socket.socket, body: dict[str, Any], number: int) -> bool:
    connection.recv(1)  # the client gives up and hangs up
    return False


def babble(connection: socket.socket, body: dict[str, Any], number: int) -> bool:
    connection.sendall(b"SMTP ready\r\n\r\n")
    return False


def unfinished(connection: socket.socket, body: dict[str, Any], number: int) -> bool:
    send_whole(connection, 200, event(choices=[{"index": 0, "text": "x"}]), EVENTS)
    return True


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (cut, "connection closed in the middle of the answer"),
        (refuse, "HTTP 503: the queue is full"),
        (hang, "no answer within 0.5 s"),
        (babble, "not HTTP/1.1"),
        (unfinished, "the stream ended without a finish"),
    ],
)
def test_a_failure_is_counted_and_the_others_go_on(tmp_path: Path, behave: Behaviour, reason: str) -> None:
    def every_third(connection: socket.socket, body: dict[str, Any], number: int) -> bool:
        return (behave if number % 3 == 1 else stream_answer)(connection, body, number)

    with foreign_server(every_third) as server:
        flags = ("--num-prompts", "6", "--random-input-len", "4", "--random-output-len", "3")
        more = ("--max-concurrency", "1", "--request-timeout", "0.5")
        result, out, err = bench(server.port, tmp_path, *flags, *more)
    assert (result["completed"], result["failed"]) == (4, 2)
    assert result["total_output_tokens"] == 12
    ((found, count),) = result["failures"].items()
    assert count == 2 and found.startswith(reason)
    assert [bool(error) for error in result["errors"]] == [i % 3 == 1 for i in range(6)]
    assert f"failed: 2 × {reason}" in err
    assert "Failed requests:                         2" in out


def test_a_connection_closed_between_requests_is_no_failure(tmp_path: Path) -> None:
    def once(connection: socket.socket, body: dict[str, Any], number: int) -> bool:
        stream_answer(connection, body, number)
        return False  # without having said so

    with foreign_server(once) as server:
        flags = ("--num-prompts", "5", "--random-input-len", "4", "--random-output-len", "2")
        result, _, _ = bench(server.port, tmp_path, *flags, "--max-concurrency", "1")
    assert (result["completed"], result["failed"]) == (5, 0)


def test_a_body_that_ends_with_the_connection(tmp_path: Path) -> None:
    def old(connection: socket.socket, body: dict[str, Any], number: int) -> bool:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        connection.sendall(event(choices=[{"index": 0, "text": "x", "finish_reason": "stop"}]))
        return False

    with foreign_server(old) as server:
        result, _, err = bench(server.port, tmp_path, "--num-prompts", "2", "--random-input-len", "4")
    assert result["completed"] == 2 and result["total_output_tokens"] == 2
    assert "no usage for 2 requests" in err


def test_a_run_of_failures_alone_ends_unclean(tmp_path: Path) -> None:
    with foreign_server(refuse) as server:
        done = pega_here(
            "bench", "serve", "--port", str(server.port), "--num-prompts", "2", "--random-input-len", "4"
        )
    assert done.returncode == 1
    assert "failed: 2 × HTTP 503" in done.stderr
