"""The loop that servers and batches run on: SIGTERM ends it wherever it strikes."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest

from pegainfer.frontend.http.server import run_loop

PATIENCE = 10.0  # seconds


class Struck(asyncio.Protocol):
    """Python's own handler would run in the middle of this callback, whose exceptions the loop keeps."""

    def data_received(self, data: bytes) -> None:
        signal.raise_signal(signal.SIGTERM)


async def waiting(closed: list[bool]) -> int:
    """Gets some bytes, then waits for what never comes."""
    ours, theirs = socket.socketpair()
    with theirs:
        transport, _ = await asyncio.get_running_loop().create_connection(Struck, sock=ours)
        theirs.sendall(b"bytes")
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.Event().wait()
        finally:
            transport.close()
            closed.append(True)
    return 0


def test_sigterm_in_a_protocols_callback_ends_the_loop() -> None:
    before = signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("not the loop's handler"))
    closed: list[bool] = []
    try:
        assert run_loop(waiting(closed)) == 128 + signal.SIGTERM
        assert closed == [True]
    finally:
        assert signal.signal(signal.SIGTERM, before) is not signal.SIG_DFL  # given back as it was


def test_a_coroutine_that_returns_gives_the_code() -> None:
    async def main() -> int:
        return 3

    assert run_loop(main()) == 3
