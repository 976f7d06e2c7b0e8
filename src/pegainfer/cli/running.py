"""The servers of this user on this machine: each one notes itself in a file, which `pegainfer ps` reads."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pegainfer.runtime.user_cache import cache_folder


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself.

    pid: of the process that listens.
    ticks: of the kernel's clock when that process started; a later process with this id has others.
    url: where it listens.
    models: names that requests may use.
    since: Unix seconds.
    """

    pid: int
    ticks: int
    url: str
    models: tuple[str, ...]
    device: str
    max_model_len: int
    since: float


def notes_folder() -> Path:
    """$XDG_RUNTIME_DIR/pegainfer, else a folder in the cache. Raises ConfigError without a home folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "pegainfer" if runtime and os.path.isdir(runtime) else cache_folder() / "running"


@contextlib.contextmanager
def noted() -> Iterator[Note]:
    """The note of this process, which is gone when the context ends."""
    note = Note()
    try:
        yield note
    finally:
        note.remove()


class Note:
    """Written once the server listens. A server that cannot write it serves all the same."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def write(self, url: str, models: Sequence[str], device: str, max_model_len: int) -> None:
        pid = os.getpid()
        note = Running(
            pid=pid, ticks=start_ticks(pid) or 0, url=url, models=tuple(models), device=device,
            max_model_len=max_model_len, since=time.time(),
        )  # fmt: skip
        with contextlib.suppress(OSError):
            folder = notes_folder()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / f"{pid}.json"
            path.write_text(json.dumps(msgspec.structs.asdict(note)))
            self._path = path

    def remove(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def running_servers() -> list[Running]:
    """Those that run, oldest first. Notes of servers that were killed are deleted."""
    found = []
    for path in sorted(notes_folder().glob("*.json")):
        try:
            raw = json.loads(path.read_bytes())
            note = Running(**{**raw, "models": tuple(raw["models"])})
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if start_ticks(note.pid) == note.ticks:
            found.append(note)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda note: note.since)


def start_ticks(pid: int) -> int | None:
    """When a process started, in ticks after boot (field 22 of proc(5)); None where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, ValueError, IndexError):
        return None
