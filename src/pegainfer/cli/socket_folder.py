"""Where the socket to the engine process lies: a private folder whose path is short enough."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pegainfer.contract.errors import ConfigError

MAX_SOCKET_BYTES = 107  # sun_path holds 108 with the zero at its end (unix(7))
SOCKET_NAME = "engine.sock"
PREFIX = "pegainfer-"
_RANDOM_BYTES = 8  # that mkdtemp puts behind the prefix


def socket_folder() -> Path:
    """A new folder that this user alone may enter.

    The temporary folder comes first. It may be read-only, as in a container without a writable root, or its
    path may be too long for a socket: then the user's runtime folder, shared memory and the home folder are
    tried.

    Raises ConfigError where none of them can be used.
    """
    tried = []
    for parent in _parents():
        if len(os.fsencode(parent / (PREFIX + "x" * _RANDOM_BYTES) / SOCKET_NAME)) > MAX_SOCKET_BYTES:
            tried.append(f"{parent} (too long)")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as e:
            tried.append(f"{parent} ({e.strerror})")
    raise ConfigError(
        "no folder for the socket to the engine",
        expected="one that is writable, with a path of less than 80 bytes",
        got=", ".join(tried),
        remedy="set TMPDIR",
    )


def _parents() -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):  # no temporary folder can be written to
        yield Path(tempfile.gettempdir())
    for given in (os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/dev/shm", os.environ.get("HOME")):
        if given:
            yield Path(given)
