"""A client process: takes Work from its standard input, waits for Go, and answers on its standard output."""

from __future__ import annotations

import gc
import signal
import sys
import time

from pegainfer.bench import wire

PROGRESS_SECONDS = 0.2


def main() -> int:
    """The process. Ends early, and quietly, where the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which hangs up
    try:
        _run(sys.stdin.fileno(), sys.stdout.fileno())
    except (EOFError, BrokenPipeError):
        return 1
    return 0


def _run(orders: int, news: int) -> None:
    import uvloop

    from pegainfer.bench.client import Client

    work = wire.receive_work(orders)
    assert isinstance(work, wire.Work)
    progress = _Progress(news)

    async def load() -> wire.Outcome:
        client = Client(work, progress.one)
        wire.send(news, wire.Ready())
        go = wire.receive_work(orders)
        assert isinstance(go, wire.Go)
        # A run makes no cycles worth collecting, and a collection would pass for a latency of the server.
        gc.collect()
        gc.freeze()
        gc.disable()
        return await client.run(go.start)

    outcome = uvloop.run(load())
    progress.flush()
    wire.send(news, outcome)


class _Progress:
    """Counts ends and tells of them now and then."""

    def __init__(self, news: int) -> None:
        self._news = news
        self._done = 0
        self._told = 0.0

    def one(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._told >= PROGRESS_SECONDS:
            self._told = now
            self.flush()

    def flush(self) -> None:
        if self._done:
            wire.send(self._news, wire.Progress(self._done))
        self._done = 0


if __name__ == "__main__":
    sys.exit(main())
