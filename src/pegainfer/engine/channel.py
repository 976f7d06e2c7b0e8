"""The engine's end of the socket: who may connect, and a thread that sends."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from pegainfer.contract import codec
from pegainfer.contract.errors import ConfigError, PegaError

log = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107  # bytes: sun_path of Linux, with its final zero


@contextlib.contextmanager
def listen(path: Path) -> Iterator[socket.socket]:
    """A listening socket that only this user can reach; its file is gone when the context ends.

    Raises ConfigError.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            "the socket's path is too long", expected=f"≤ {MAX_SOCKET_PATH} bytes", got=str(path)
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.parent.stat()
        if state.st_uid != os.getuid() or state.st_mode & 0o077:
            raise ConfigError(
                "the socket's folder is open to others",
                expected="mode 0700, owned by this user",
                where=path.parent,
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(path))
            os.chmod(path, 0o600)
            listener.listen(1)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError("cannot make the engine's socket", got=error.strerror, where=path) from error
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def accept(listener: socket.socket, seconds: float) -> socket.socket:
    """The front's connection. Raises TimeoutError."""
    listener.settimeout(seconds)
    while True:
        front, _ = listener.accept()
        _, uid, _ = struct.unpack("3i", front.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid == os.getuid():
            front.settimeout(None)
            return front
        log.warning("a connection of user %d was turned away", uid)
        front.close()


class Writer:
    """Sends frames on a thread of its own, in the order of `put`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: queue.SimpleQueue[codec.ToFront | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine-writer", daemon=True)
        self._thread.start()

    def put(self, message: codec.ToFront) -> None:
        self._queue.put(message)

    def close(self) -> None:
        """Returns when all that was put is sent, or the front is gone."""
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        gone = False
        while (message := self._queue.get()) is not None:
            if gone:
                continue
            try:
                for frame in _frames(message):
                    self._sock.sendall(frame)
            except (OSError, PegaError) as error:
                # A front that is done hangs up: nothing to tell.
                hung_up = isinstance(error, (BrokenPipeError, ConnectionResetError))
                level = logging.DEBUG if hung_up else logging.WARNING
                log.log(level, "the front cannot be reached: %s", error)
                gone = True  # the reader sees it too and ends the process
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)


def _frames(message: codec.ToFront) -> Iterator[bytes]:
    """A message as one frame, or a step's events as several where they are too large for one.

    Raises PegaError for what cannot be cut; no event is that large (`engine.check`).
    """
    try:
        yield codec.encode_frame(message)
    except PegaError:
        if not isinstance(message, codec.Events) or len(message.events) < 2:
            raise
        half = len(message.events) // 2
        yield from _frames(codec.Events(message.events[:half]))
        yield from _frames(codec.Events(message.events[half:], message.stats))
