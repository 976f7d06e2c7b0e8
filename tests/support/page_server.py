"""The HTTP app on a real port, in a thread, over an engine that says what a test tells it. For browsers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import uvicorn

from pegainfer.contract.event import EngineStats
from pegainfer.contract.request import GenerateRequest, unpack_tokens
from pegainfer.frontend.byte_tokenizer import SPECIAL_TOKENS
from pegainfer.frontend.http.connection.server import address_of, bind_socket
from tests.support.asgi import make_app
from tests.support.fake_engine import INFO, FakeEngine

END = 257  # <|im_end|>
PIECE = 24  # bytes of an answer that come at once


class PageServer:
    """Answers come in the order of `say`; after the last one, a short default."""

    def __init__(self, **config: Any) -> None:
        info = msgspec.structs.replace(INFO, max_model_len=1 << 22)
        self.engine = FakeEngine(self._script, info=info)
        self._answers: list[bytes] = []
        self._socket = bind_socket("127.0.0.1", 0)
        self.url = address_of(self._socket)
        self.app = make_app(self.engine, names=("demo-model", "demo-model-b"), **config)
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def say(self, *answers: str | bytes) -> None:
        self._answers += [a.encode() if isinstance(a, str) else a for a in answers]

    def hold(self) -> None:
        """Answers stand still until `let` or `release`."""
        self.engine.paused = True

    def let(self, events: int) -> None:
        """So many more events of what is held, once it has arrived."""
        self.wait_until(lambda: self.engine.num_live)
        for _ in range(events):
            self.call(self.engine.step)

    def release(self) -> None:
        self.call(self.engine.resume)

    def stats(self, **fields: Any) -> None:
        """What the engine's counters show from now on."""
        self.call(lambda: self.engine.set_stats(EngineStats(**fields)))

    def prompts(self) -> list[str]:
        """The prompts that the engine was given, as text."""
        return [_text(request) for request in self.engine.requests]

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Asks on the server's loop, again and again; the test's own timeout ends it."""
        while not self.call(condition):
            pass

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs something on the server's loop."""

        async def job() -> Any:
            return work()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(job(), self._loop).result(30)

    def _script(self, request: GenerateRequest, index: int) -> Sequence[int | tuple[int, ...]]:
        answer = self._answers.pop(0) if self._answers else b"All right."
        return [tuple(answer[i : i + PIECE]) for i in range(0, len(answer), PIECE)] + [END]

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._up.set()
        await serving

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(30)

    def stop(self) -> None:
        self.release()  # nothing is left to wait for
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()


def _text(request: GenerateRequest) -> str:
    out = bytearray()
    for token in unpack_tokens(request.prompt):
        out += bytes([token]) if token < 256 else SPECIAL_TOKENS[token - 256].encode()
    return out.decode()


@contextlib.contextmanager
def page_server(**config: Any) -> Iterator[PageServer]:
    """Keyword arguments are HttpConfig's."""
    server = PageServer(**config)
    server.start()
    try:
        yield server
    finally:
        server.stop()
