"""Batches: what each line is answered with, and how a run goes on where one ended."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pegainfer.contract.errors import ConfigError, EngineDeadError
from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.batch import batch, batch_files
from pegainfer.frontend.http.batch.batch import BatchRun
from pegainfer.frontend.http.batch.batch_files import count_lines, open_output
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import TEMPLATE, TOKENIZER, run, spin
from tests.support.fake_engine import FakeEngine
from tests.support.scripted import app_of, scripted

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def line(custom_id: Any, url: str = "/v1/chat/completions", body: Any = CHAT, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}


def go(
    lines: list[Any], output: Path, engine: FakeEngine | None = None, **options: Any
) -> tuple[BatchRun, list[dict[str, Any]]]:
    """The run and all answers of the output, in its order."""
    raw = b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
    runs: list[BatchRun] = []

    async def main() -> None:
        app = app_of(engine or scripted("hello"))
        file, done = open_output(output)
        with file:
            runs.append(BatchRun(app, file, done, concurrency=2, **options))
            await runs[0].run(io.BytesIO(raw))

    run(main)
    return runs[0], [json.loads(x) for x in output.read_text().splitlines()]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_every_route_answers(output: Path) -> None:
    steps: list[None] = []
    ran, answers = go(
        [
            line("chat"),
            line("text", "/v1/completions", {"prompt": "a", "max_tokens": 2}),
            line("response", "/v1/responses", {"input": "hi", "max_output_tokens": 2}),
            line("message", "/v1/messages", CHAT),
            line("vector", "/v1/embeddings", {"input": "ab", "normalize": False}),
        ],
        output,
        on_line=lambda: steps.append(None),
    )
    by_id = {a["custom_id"]: a for a in answers}
    assert all(a["id"].startswith("batch_req_") and a["error"] is None for a in answers)
    bodies = {name: a["response"]["body"] for name, a in by_id.items()}
    assert {a["response"]["status_code"] for a in answers} == {200}
    assert bodies["chat"]["choices"][0]["message"]["content"] == "hel"
    assert bodies["text"]["choices"][0]["text"] == "he"
    assert bodies["response"]["output"][0]["content"][0]["text"] == "he"
    assert bodies["vector"]["data"][0]["embedding"] == [97, 98, 2]
    assert bodies["message"]["content"][0]["text"] == "hel"
    assert by_id["chat"]["response"]["request_id"] == bodies["chat"]["id"].removeprefix("chatcmpl-")
    assert (ran.counts.answered, ran.counts.failed, ran.counts.kept, len(steps)) == (5, 0, 0, 5)


def test_what_fails_says_so_in_its_own_line(output: Path) -> None:
    lines = [
        line("bad", body={**CHAT, "temperature": -1}),
        line("absent", body={**CHAT, "model": "other"}),
        b"",
        b"{",
        line("stream", body={**CHAT, "stream": True}),
        line("method", method="GET"),
        line("url", "/health"),
        line(5),
        line("more", colour="red"),
        b"[]",
        line("good"),
        line("good"),
    ]
    ran, answers = go(lines, output)
    codes = {a["custom_id"]: a["response"]["status_code"] for a in answers if a["response"]}
    assert codes == {"bad": 400, "absent": 404, "good": 200}
    faults = {a["error"]["message"]: a["custom_id"] for a in answers if a["error"]}
    assert [(m.split(": ")[0], m.split(": ")[1], faults[m]) for m in sorted(faults, key=number)] == [
        ("line 4", "request body", None),
        ("line 5", "body.stream", "stream"),
        ("line 6", "method", "method"),
        ("line 7", "url", "url"),
        ("line 8", "custom_id", None),
        ("line 9", "colour", "more"),
        ("line 10", "expected a JSON object", None),
        ("line 12", "custom_id", None),
    ]
    assert (ran.counts.answered, ran.counts.failed) == (1, 10)
    # Faults are answered once, too.
    again, answers = go(lines, output)
    assert (again.counts.kept, again.counts.failed, len(answers)) == (11, 0, 11)


def number(message: str) -> int:
    return int(message.split(":")[0].removeprefix("line "))


def test_a_run_goes_on_where_one_ended(output: Path) -> None:
    engine = scripted("hello")
    go([line("a"), line("b")], output, engine)
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_1","custom_id":"c","resp')  # interrupted within a line
    ran, answers = go([line("a"), line("b"), line("c"), line("d")], output, engine)
    assert sorted(a["custom_id"] for a in answers) == ["a", "b", "c", "d"]
    assert (ran.counts.kept, ran.counts.answered) == (2, 2)
    assert len(engine.requests) == 4


def test_a_foreign_output_is_left_alone(output: Path) -> None:
    output.write_text("precious\n")
    with pytest.raises(ConfigError, match="line 1 is no answer"):
        open_output(output)
    assert output.read_text() == "precious\n"
    with pytest.raises(ConfigError, match="cannot write"):
        open_output(output / "below")
    with pytest.raises(ConfigError, match="cannot read"):
        count_lines(output / "below")


def test_the_concurrency_is_bounded_and_a_full_queue_is_waited_for(output: Path) -> None:
    engine = scripted("hello", paused=True)

    async def main() -> None:
        app = app_of(engine, max_queued_requests=1, max_prompts=1)
        file, done = open_output(output)
        raw = b"\n".join(json.dumps(line(str(i))).encode() for i in range(4))
        with file:
            batch = BatchRun(app, file, done, concurrency=3)
            running = asyncio.ensure_future(batch.run(io.BytesIO(raw)))
            await spin()
            assert len(engine.requests) == 1  # the two others wait for a place in the queue
            engine.resume()
            counts = await running
            assert (counts.answered, counts.failed) == (4, 0)

    run(main)


def test_a_dead_engine_ends_the_run_and_its_lines_stay_open(output: Path) -> None:
    engine = scripted("hello")
    go([line("a")], output, engine)
    engine.die()
    with pytest.raises(EngineDeadError):
        engine.refuse = EngineDeadError("gone")
        go([line("a"), line("b")], output, engine)
    assert len(output.read_text().splitlines()) == 1


def test_a_line_too_long_is_told_and_not_kept_in_memory(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MAX_FRAME", 100)
    reads: list[int] = []

    class Noting(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            assert size is not None
            reads.append(size)
            return super().readline(size)

    config = HttpConfig(max_body_bytes=500)
    long = json.dumps(line("long", body={**CHAT, "user": "x" * 3_000_000}))
    given = "\n".join([json.dumps(line("a")), long, json.dumps(line("b")), long])
    app = create_app(scripted("hello"), TOKENIZER, TEMPLATE, config)

    async def main() -> None:
        file, done = open_output(output)
        with file:
            await BatchRun(app, file, done, concurrency=1).run(Noting(given.encode()))

    run(main)
    answers = [json.loads(x) for x in output.read_text().splitlines()]
    faults = [a["error"]["message"] for a in answers if a["error"]]
    assert faults == [f"line {n}: too long; expected ≤ 600 bytes" for n in (2, 4)]
    assert [a["custom_id"] for a in answers if not a["error"]] == ["a", "b"]
    assert max(reads) <= batch_files.MAX_READ


def test_a_body_may_be_as_deep_and_as_long_as_over_http(output: Path) -> None:
    deep: Any = 1
    for _ in range(62):  # the body itself is one level, its field another
        deep = [deep]
    _, answers = go([line("x", body={**CHAT, "nothing": deep})], output)
    assert answers[0]["response"]["body"]["error"]["message"].startswith("nothing: unknown field")


def test_an_output_is_one_runs_alone(output: Path) -> None:
    file, _ = open_output(output)
    with file, pytest.raises(ConfigError, match="another run"):
        open_output(output)
    open_output(output)[0].close()


@pytest.mark.parametrize("what", ["pipe", "folder", "device"])
def test_what_is_no_file_is_neither_read_nor_written(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="input is no file"):
        count_lines(path)
    with pytest.raises(ConfigError, match="output is no file"):
        open_output(path)


def test_a_full_disk_ends_the_run_and_the_next_goes_on(output: Path) -> None:
    """The line that did not fit is answered again."""
    lines = [line(str(i)) for i in range(6)]
    go(lines[:3], output)
    kept = output.read_bytes()

    class Full(io.BufferedRandom):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        file, done = open_output(output)
        os.write(file.fileno(), b'{"id": "batch_')  # as much of it as found room
        full = Full(io.FileIO(os.dup(file.fileno()), "r+"))
        with file, full, pytest.raises(OSError, match="No space"):
            raw = "\n".join(json.dumps(x) for x in lines).encode()
            await BatchRun(app_of(scripted("hello")), full, done, concurrency=2).run(io.BytesIO(raw))

    run(main)
    assert output.read_bytes().startswith(kept)
    ran, answers = go(lines, output)
    assert sorted(a["custom_id"] for a in answers) == list("012345")
    assert (ran.counts.kept, ran.counts.answered) == (3, 3)


def test_what_has_its_answer_is_not_asked_again_whatever_it_says_now(output: Path) -> None:
    go([line("a"), line("a"), b"{"], output)
    engine = scripted("other")
    changed = [b"{", line("b"), line("a", body={**CHAT, "max_tokens": 1})]
    ran, answers = go(changed, output, engine)
    assert len(engine.requests) == 1
    assert (ran.counts.kept, ran.counts.answered, ran.counts.failed) == (1, 1, 1)
    assert [a["custom_id"] for a in answers if a["response"]] == ["a", "b"]
