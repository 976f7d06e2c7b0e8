"""The access log: what stands in a line, and that a disk that fails costs lines and nothing else."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.event import Timings
from pegainfer.contract.observation import RequestRecord
from pegainfer.observe import access_log
from pegainfer.observe.access_log import AccessLog

RECORD = RequestRecord(
    method="GET", path="/v1/models", client="127.0.0.1", status=200, began=12.5, seconds=0.25
)


def test_a_line_a_request(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.write_text("before\n")
    log = AccessLog(str(path))
    log(RECORD)
    odd = "/\x1b[2J\n\u2028\x85\U0001f600"
    log(RequestRecord(method="POST", path=odd, began=1.0, id='a"b', error="got 'secret'"))
    log.close()
    before, first, second = path.read_text().splitlines()
    assert before == "before" and path.read_bytes().isascii()
    assert json.loads(first) == {
        "method": "GET", "path": "/v1/models", "client": "127.0.0.1", "status": 200, "began": 12.5,
        "seconds": 0.25,
    }  # fmt: skip
    assert json.loads(second)["path"] == "/\x1b[2J\n\u2028\x85\U0001f600"
    assert all(c.isprintable() for c in second)
    assert "secret" not in second  # reasons may quote the request


def test_stages_are_in_a_line_and_monotonic_times_are_not(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "access.log"))
    log(
        RequestRecord(
            method="POST", path="/", began=1.0, clock=5.5, stages={"template": 0.25}, late=0.5, gap=0.125,
            timings=Timings(arrival=5.5),
        )
    )  # fmt: skip
    log.close()
    assert json.loads((tmp_path / "access.log").read_text()) == {
        "method": "POST", "path": "/", "began": 1.0, "stages": {"template": 0.25}, "late": 0.5, "gap": 0.125,
    }  # fmt: skip


def test_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    log = AccessLog("-")
    log(RECORD)
    log.close()
    assert json.loads(capsys.readouterr().out)["path"] == "/v1/models"


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path, old = tmp_path / "access.log", tmp_path / "access.log.1"
    log = AccessLog(str(path))
    log(RECORD)
    log._listener.stop()  # what waited has been written
    path.rename(old)
    log._listener.start()
    log(RECORD)
    log.close()
    assert len(old.read_text().splitlines()) == len(path.read_text().splitlines()) == 1


def test_a_full_disk_loses_lines_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("/dev/full")
    for _ in range(5):
        log(RECORD)
    log.close()
    assert log._lost == 5
    assert caplog.text.count("lines lost so far") == 1 and "No space left" in caplog.text


def test_a_disk_that_does_not_keep_up_never_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "MAX_QUEUED", 4)
    log = AccessLog(str(tmp_path / "access.log"))
    begun, go_on = threading.Event(), threading.Event()
    emit = log._handler.emit

    def slow(record: logging.LogRecord) -> None:
        begun.set()
        go_on.wait()
        emit(record)

    monkeypatch.setattr(log._handler, "emit", slow)
    log(RECORD)
    begun.wait()
    for _ in range(10):
        log(RECORD)
    assert log._lost == 6 and "does not keep up" in caplog.text
    go_on.set()
    log.close()
    assert len((tmp_path / "access.log").read_text().splitlines()) == 5


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the access log: No such file.*--access-log"):
        AccessLog(str(tmp_path / "none" / "x.log"))
