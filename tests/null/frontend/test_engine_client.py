"""The front's end of the socket, against a peer whose every frame is in the test's hands."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pegainfer.contract import codec
from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import ConfigError, EngineDeadError, PegaError, QueueFullError, RequestError
from pegainfer.contract.event import EngineStats, FinishReason, TokenEvent
from pegainfer.contract.frames import HEADER_BYTES, body_length, frame_of
from pegainfer.contract.request import GenerateRequest, pack_tokens
from pegainfer.frontend.engine_client import EngineClient
from tests.support.fake_engine import INFO


class Peer:
    """The engine's half of a socketpair."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self._sock = ours
        ours.setblocking(False)

    async def connect(
        self, *, ready: bool = True, explain: Callable[[], Coroutine[Any, Any, EngineDeadError]] | None = None
    ) -> EngineClient:
        if ready:
            await self.send(codec.Ready(INFO))
        return await EngineClient.attach(self._theirs, explain)

    async def send(self, *messages: codec.ToFront) -> None:
        await self.send_raw(b"".join(codec.encode_frame(m) for m in messages))

    async def send_raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def receive(self) -> codec.ToEngine | None:
        """The next message; None at the stream's end."""
        head = await self._exactly(HEADER_BYTES)
        if head is None:
            return None
        body = await self._exactly(body_length(head))
        assert body is not None
        return codec.decode_to_engine(body)

    async def _exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            more = await asyncio.get_running_loop().sock_recv(self._sock, size - len(data))
            if not more:
                return None
            data += more
        return data

    def close(self) -> None:
        self._sock.close()


class Sink:
    """Collects events; `until` waits for so many."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self._changed = asyncio.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, count: int) -> list[TokenEvent]:
        while len(self.events) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.events


def request(id: str = "r", n: int = 1) -> GenerateRequest:
    return GenerateRequest(id=id, prompt=pack_tokens([1, 2, 3]), n=n)


def event(id: str = "r", index: int = 0, finish: FinishReason | None = None, *tokens: int) -> TokenEvent:
    return TokenEvent(request_id=id, index=index, tokens=tokens, finish=finish)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On asyncio's own loop and on the server's, whose transports are of another kind."""
    for loop_factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(asyncio.wait_for(main(), 30))


def test_a_request_and_its_events() -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()
        assert client.info == INFO
        assert client.alive()
        sink = Sink()
        client.submit(request(n=2), sink)
        assert await peer.receive() == codec.Submit(request(n=2))
        sent = [event("r", 0, None, 5), event("r", 1, None, 6), event("r", 1, FinishReason.STOP, 7)]
        await peer.send(codec.Events(sent, EngineStats(running=1)))
        assert await sink.until(3) == sent
        assert client.stats().running == 1
        assert client.num_live == 1
        await peer.send(codec.Events([event("r", 0, FinishReason.LENGTH)]))
        await sink.until(4)
        assert client.num_live == 0
        assert client.stats().running == 1  # the latest one that came

    run(main)


def test_frames_may_be_cut_anywhere() -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()
        sink = Sink()
        client.submit(request(), sink)
        frames = b"".join(
            codec.encode_frame(codec.Events([event("r", 0, None, i)])) for i in range(20)
        ) + codec.encode_frame(codec.Events([event("r", 0, FinishReason.LENGTH, 20)]))
        for byte in frames:
            await peer.send_raw(bytes([byte]))
        await sink.until(21)
        assert [e.tokens[0] for e in sink.events] == list(range(21))
        assert client.num_live == 0

    run(main)


def test_a_refusal_is_an_error_event_of_each_index() -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()
        sink = Sink()
        client.submit(request(n=2), sink)
        await peer.send(codec.Refused("r", "QueueFullError", "full", None, 2.5))
        for index, got in enumerate(await sink.until(2)):
            assert (got.index, got.finish, got.error) == (index, FinishReason.ERROR, "full")
            assert (got.error_kind, got.retry_after) == ("QueueFullError", 2.5)
        client.submit(request(), sink)
        await peer.send(codec.Refused("r", "RequestError", "too long", "prompt"))
        await sink.until(3)
        assert (sink.events[2].error_kind, sink.events[2].error_param) == ("RequestError", "prompt")
        assert client.num_live == 0

    run(main)


def test_cancel_waits_for_the_engines_word() -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()
        sink = Sink()
        client.submit(request(), sink)
        client.cancel("r")
        client.cancel("r", 0)
        client.cancel("r", 1)  # there is none
        client.cancel("unknown")
        assert isinstance(await peer.receive(), codec.Submit)
        assert await peer.receive() == codec.Cancel("r")
        assert await peer.receive() == codec.Cancel("r", 0)
        assert client.num_live == 1
        await peer.send(codec.Events([event("r", 0, FinishReason.ABORT)]))
        assert (await sink.until(1))[0].finish is FinishReason.ABORT
        assert client.num_live == 0
        client.cancel("r")  # of what has ended: nothing is sent
        client.drain()
        assert isinstance(await peer.receive(), codec.Drain)

    run(main)


def test_events_of_unknown_requests_are_ignored() -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()
        sink = Sink()
        client.submit(request(), sink)
        stray = [event("other", 0, None, 1), event("r", 0, FinishReason.STOP, 2), event("r", 0, None, 3)]
        await peer.send(codec.Events(stray), codec.Refused("other", "RequestError", "x"))
        client.submit(request("s"), sink)
        await peer.send(codec.Events([event("s", 0, FinishReason.STOP)]))
        assert [e.request_id for e in await sink.until(2)] == ["r", "s"]

    run(main)


def test_one_sinks_fault_does_not_stop_the_others() -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()

        def broken(event: TokenEvent) -> None:
            raise ValueError("a bug")

        sink = Sink()
        client.submit(request("a"), broken)
        client.submit(request("b"), sink)
        await peer.send(codec.Events([event("a", 0, FinishReason.STOP), event("b", 0, FinishReason.STOP)]))
        await sink.until(1)
        assert client.num_live == 0
        assert client.alive()

    run(main)


@pytest.mark.parametrize("how", ["close", "failed", "garbage", "huge frame"])
def test_the_engines_death_reaches_every_request_at_once(how: str) -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()
        sinks = [Sink(), Sink()]
        client.submit(request("a", n=2), sinks[0])
        client.submit(request("b"), sinks[1])
        await peer.send(codec.Events([event("a", 0, FinishReason.STOP, 1)]))
        await sinks[0].until(1)
        if how == "close":
            peer.close()
        elif how == "failed":
            await peer.send(codec.Failed("the device is gone", user_error=False))
        elif how == "garbage":
            await peer.send_raw(frame_of(b"\xc1\xc1\xc1"))
        else:
            await peer.send_raw(b"\xff" * HEADER_BYTES)
        last = (await sinks[0].until(2))[1]
        assert (last.index, last.finish, last.error_kind) == (1, FinishReason.ERROR, "EngineDeadError")
        if how == "failed":
            assert last.error is not None and "the device is gone" in last.error
        assert (await sinks[1].until(1))[0].error_kind == "EngineDeadError"
        assert not client.alive()
        await client.wait_closed()
        with pytest.raises(EngineDeadError):
            client.submit(request("c"), sinks[0])
        client.cancel("a")
        assert client.num_live == 0
        assert [len(s.events) for s in sinks] == [2, 1]

    run(main)


def test_a_user_error_before_ready_is_the_users() -> None:
    async def main() -> None:
        peer = Peer()
        await peer.send(codec.Failed("no such model; expected a file, got nothing", user_error=True))
        with pytest.raises(ConfigError, match="no such model"):
            await peer.connect(ready=False)

    run(main)


@pytest.mark.parametrize("word", [None, codec.Failed("a bug", user_error=False)])
def test_an_end_before_ready_raises(word: codec.Failed | None) -> None:
    async def main() -> None:
        peer = Peer()
        if word is not None:
            await peer.send(word)
        peer.close()
        with pytest.raises(EngineDeadError, match="a bug" if word else "ended"):
            await peer.connect(ready=False)

    run(main)


def test_refusals_that_need_no_engine() -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()
        client.submit(request(), Sink())
        with pytest.raises(RequestError) as refused:
            client.submit(request(), Sink())
        assert refused.value.param == "request_id"
        client.drain()
        client.drain()
        with pytest.raises(QueueFullError):
            client.submit(request("s"), Sink())
        assert isinstance(await peer.receive(), codec.Submit)
        assert isinstance(await peer.receive(), codec.Drain)
        client.close()
        assert isinstance(await peer.receive(), codec.Shutdown)
        assert await peer.receive() is None

    run(main)


def test_close_ends_what_is_live() -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()
        sink = Sink()
        client.submit(request(), sink)
        client.close()
        client.close()
        await client.wait_closed()
        assert (await sink.until(1))[0].error_kind == "EngineDeadError"
        assert not client.alive()

    run(main)


def test_connect_waits_for_the_socket(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "engine.sock")
        connecting = asyncio.ensure_future(EngineClient.connect(path))
        await asyncio.sleep(0)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(codec.encode_frame(codec.Ready(INFO)))
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(serve, path)
        client = await connecting
        assert client.info == INFO
        client.close()
        await client.wait_closed()
        server.close()

    run(main)


def test_connect_gives_up_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(EngineDeadError, match="no engine listens"):
            await EngineClient.connect(str(tmp_path / "none.sock"), timeout=0.02)

    run(main)


@pytest.mark.parametrize("end", ["done", "refused", "death"])
def test_a_call_ends_once(end: str) -> None:
    async def main() -> None:
        peer = Peer()
        client = await peer.connect()
        ends: list[PegaError | None] = []
        client.load_adapter("a", "/a", ends.append)
        sent = await peer.receive()
        assert isinstance(sent, codec.LoadAdapter)
        assert (sent.name, sent.path) == ("a", "/a")
        adapter = AdapterInfo(name="a", path="/a", digest=b"x" * 32)
        if end == "done":
            await peer.send(codec.Adapters([adapter]), codec.Done(sent.call))
        elif end == "refused":
            await peer.send(codec.Done(sent.call, "RequestError", "no such adapter", "lora_name"))
        else:
            await peer.send(codec.Failed("boom", user_error=False))
        while not ends:
            await asyncio.sleep(0)
        client.close()
        await client.wait_closed()
        (error,) = ends
        if end == "done":
            assert error is None and client.adapters() == (adapter,)
        elif end == "refused":
            assert isinstance(error, RequestError) and error.param == "lora_name"
        else:
            assert isinstance(error, EngineDeadError) and "boom" in str(error)
        client.reset_prefix_cache(ends.append)  # the engine is gone
        assert len(ends) == 2 and isinstance(ends[1], EngineDeadError)

    uvloop.run(main())
