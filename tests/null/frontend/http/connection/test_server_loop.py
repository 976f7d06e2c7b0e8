"""The loop that servers and batches run on: SIGTERM and SIGINT end it wherever they strike."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest

from pegainfer.frontend.http.connection.server import run_loop

PATIENCE = 10.0  # seconds


class Struck(asyncio.Protocol):
    """Python's own handler would run in the middle of this callback, whose exceptions the loop keeps."""

    def __init__(self, number: int) -> None:
        self._number = number

    def data_received(self, data: bytes) -> None:
        signal.raise_signal(self._number)


async def waiting(number: int, closed: list[bool]) -> int:
    """Gets some bytes, then waits for what never comes."""
    ours, theirs = socket.socketpair()
    with theirs:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: Struck(number), sock=ours)
        theirs.sendall(b"bytes")
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.Event().wait()
        finally:
            transport.close()
            closed.append(True)
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_protocols_callback_ends_the_loop(number: int) -> None:
    def ours(number: int, frame: object) -> None:
        pytest.fail("not the loop's handler")

    before = signal.signal(number, ours)
    closed: list[bool] = []
    try:
        assert run_loop(waiting(number, closed)) == 128 + number
        assert closed == [True]
    finally:
        assert signal.signal(number, before) is ours  # given back as it was


def test_further_signals_do_not_disturb_the_end() -> None:
    tidied: list[bool] = []

    async def main() -> int:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(0.01)
            tidied.append(True)
        return 0

    assert run_loop(main()) == 128 + signal.SIGINT
    assert tidied == [True]


def test_a_coroutine_that_returns_gives_the_code() -> None:
    async def main() -> int:
        return 3

    assert run_loop(main()) == 3
