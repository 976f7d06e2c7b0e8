"""What the server sees of an engine that dies and of the one that takes its place."""

from __future__ import annotations

import asyncio

import pytest

from pegainfer.contract import codec
from pegainfer.contract.errors import EngineDeadError, QueueFullError
from pegainfer.contract.event import EngineStats, FinishReason
from pegainfer.contract.handle import EngineHandle
from pegainfer.frontend.supervised import SupervisedEngine
from tests.null.frontend.test_engine_client import Peer, Sink, event, request, run


async def gone() -> EngineDeadError:
    return EngineDeadError("the engine process has ended", got="signal 9 (SIGKILL)")


def test_what_was_in_flight_fails_with_the_reason_and_the_rest_goes_on() -> None:
    async def main() -> None:
        first = Peer()
        engine: EngineHandle = SupervisedEngine(await first.connect(explain=gone))
        assert isinstance(engine, SupervisedEngine)
        sink = Sink()
        engine.submit(request("a"), sink)
        first.close()
        (last,) = await sink.until(1)
        assert (last.finish, last.error_kind) == (FinishReason.ERROR, "EngineDeadError")
        assert last.error == "the engine process has ended; got signal 9 (SIGKILL)"
        await engine.wait_closed()
        assert not engine.alive() and "signal 9" in str(engine.death())
        with pytest.raises(EngineDeadError, match="signal 9"):
            engine.submit(request("b"), sink)

        second = Peer()
        engine.replace(await second.connect())
        assert engine.alive() and engine.death() is None
        engine.submit(request("c"), sink)
        assert await second.receive() == codec.Submit(request("c"))
        await second.send(codec.Events([event("c", 0, FinishReason.STOP, 1)], EngineStats(running=7)))
        assert (await sink.until(2))[1].tokens == (1,)
        assert engine.stats().running == 7

    run(main)


def test_nothing_is_taken_while_the_reason_is_looked_for() -> None:
    async def main() -> None:
        known = asyncio.Event()

        async def later() -> EngineDeadError:
            await known.wait()
            return await gone()

        peer = Peer()
        client = await peer.connect(explain=later)
        sink = Sink()
        client.submit(request("a"), sink)
        peer.close()
        while client.alive():
            await asyncio.sleep(0)
        assert sink.events == []
        with pytest.raises(EngineDeadError):
            client.submit(request("b"), sink)
        known.set()
        await client.wait_closed()
        assert "signal 9" in str(sink.events[0].error)

    run(main)


def test_a_reason_that_cannot_be_had_ends_the_requests_all_the_same() -> None:
    async def main() -> None:
        async def broken() -> EngineDeadError:
            raise OSError("no such process")

        peer = Peer()
        client = await peer.connect(explain=broken)
        sink = Sink()
        client.submit(request("a"), sink)
        peer.close()
        assert (await sink.until(1))[0].error_kind == "EngineDeadError"
        await client.wait_closed()

    run(main)


def test_an_engine_that_comes_while_the_server_drains_is_drained() -> None:
    async def main() -> None:
        first, second = Peer(), Peer()
        engine = SupervisedEngine(await first.connect(explain=gone))
        first.close()
        await engine.wait_closed()
        engine.drain()
        engine.replace(await second.connect())
        assert await second.receive() == codec.Drain()
        with pytest.raises(QueueFullError):
            engine.submit(request("a"), Sink())

    run(main)
