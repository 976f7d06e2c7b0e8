"""The lines of a batch and the files that hold them.

in.jsonl:  {"custom_id", "method": "POST", "url", "body"} a line
out.jsonl: {"id", "custom_id", "response": {"status_code", "request_id", "body"} | null, "error"} a line
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from pegainfer.contract.errors import ConfigError

MAX_READ = 1 << 20  # bytes of a line that are read at once where they are not kept


class BatchError(msgspec.Struct):
    code: str
    message: str


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, kw_only=True):
    """A line of the output. error: why a line is no request; a request that fails has a response."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def key(self) -> str:
        """What tells a line's answer: its custom_id, or its fault, which names the line."""
        if self.custom_id is not None:
            return "id:" + self.custom_id
        return "fault:" + ("" if self.error is None else self.error.message)


@dataclass(frozen=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        """As its answer's."""
        return "id:" + self.custom_id


def read_lines(file: IO[bytes], most: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank with their numbers; of one longer than `most` bytes only its beginning."""
    number = 0
    while line := file.readline(most + 1):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_READ)):
            pass
        if line.strip():
            yield number, line


def count_lines(path: Path) -> int:
    """Lines of the input that are not blank. Raises ConfigError where it cannot be read."""
    with open_input(path) as file:
        return sum(1 for _ in read_lines(file, MAX_READ))


def open_input(path: Path) -> IO[bytes]:
    """Raises ConfigError, also for what cannot be read twice: the lines are counted first."""
    try:
        _check_file(path, "input", "write it to a file first")
        return path.open("rb")
    except OSError as e:
        raise ConfigError("cannot read the input", got=e.strerror, where=path) from e


def _check_file(path: Path, what: str, remedy: str) -> None:
    """Raises ConfigError for a pipe, a folder or a device, whose lines may never end."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"the {what} is no file", got=path, remedy=remedy)


def open_output(path: Path) -> tuple[IO[bytes], set[str]]:
    """The output, ready for further lines, and the keys of those that it holds.

    A last line without its end, as an interrupted run leaves it, is cut off. The file is this run's alone
    until it is closed.

    Raises ConfigError for a file that cannot be written, that is no output of a batch, or another run's.
    """
    try:
        _check_file(path, "output", "choose another --output")
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    except OSError as e:
        raise ConfigError("cannot write the output", got=e.strerror, where=path) from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError("another run writes this output", got=path, remedy="wait for its end") from None
    except OSError:  # a file system without locks
        pass
    keys: set[str] = set()
    end = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            keys.add(msgspec.json.decode(line, type=BatchAnswer).key)
        except msgspec.MsgspecError as e:
            file.close()
            remedy = "choose another --output"
            what = f"line {number} is no answer of a batch"
            raise ConfigError(what, got=str(e), where=path, remedy=remedy) from None
        end += len(line)
    file.seek(end)
    file.truncate()
    return file, keys
