"""Lines for refused and failed requests: what they say, and how a flood of them is cut short."""

from __future__ import annotations

import logging

import pytest

from pegainfer.contract.observation import RequestRecord
from pegainfer.observe.console import BURST, MAX_REASON, ConsoleLines


def record(status: int = 400, error: str = "why", path: str = "/v1/x") -> RequestRecord:
    return RequestRecord(method="POST", path=path, client="1.2.3.4", status=status, error=error, began=0.0)


def test_one_line_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    lines = ConsoleLines()
    lines(record())
    lines(record(503, "the queue is full"))
    lines(record(200, ""))
    lines(record(503, "the server is shutting down", "/ready"))
    lines(record(200, "the engine process has ended"))  # in the middle of a stream
    assert [(r.levelno, r.message) for r in caplog.records] == [
        (logging.WARNING, "400 POST /v1/x from 1.2.3.4: why"),
        (logging.ERROR, "503 POST /v1/x from 1.2.3.4: the queue is full"),
        (logging.WARNING, "200 POST /v1/x from 1.2.3.4: the engine process has ended"),
    ]


def test_nothing_disturbs_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    ConsoleLines()(record(error="a\x1b[31m\nERROR root: b" + "c" * 1000, path="/\r\x07"))
    (line,) = caplog.messages
    assert line.isprintable() and len(line) < MAX_REASON + 60 and line.endswith("c…")


def test_a_flood_is_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    lines = ConsoleLines(lambda: now[0])
    for _ in range(BURST + 7):
        lines(record())
    assert len(caplog.messages) == BURST
    now[0] = 2.5
    for _ in range(5):
        lines(record())
    assert caplog.messages[BURST:] == [
        "7 more requests were refused or failed",
        *["400 POST /v1/x from 1.2.3.4: why"] * 2,
    ]
    lines.close()
    assert caplog.messages[-1] == "3 more requests were refused or failed"
    lines.close()
    assert caplog.messages[-2:] != ["3 more requests were refused or failed"] * 2
