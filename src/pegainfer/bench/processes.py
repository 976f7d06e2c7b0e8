"""The client processes: work is dealt to them, they start together, their outcomes are put together."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, cast

from pegainfer.bench import wire
from pegainfer.contract.errors import EngineDeadError

START_DELAY = 0.05  # seconds from the last Ready to the common start
AUTO_SHARE = 4  # cores for each process by default: the server may need the others
AUTO_PLACES = 32  # requests at one time that are worth a process of their own


def process_count(wanted: int, places: int) -> int:
    """How many processes send.

    Args:
        wanted: by the user; 0: chosen.
        places: requests at one time.
    """
    if wanted:
        return min(wanted, places)
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // AUTO_SHARE, -(-places // AUTO_PLACES)))


def deal(jobs: list[wire.Job], processes: int, concurrency: int) -> list[tuple[list[wire.Job], int]]:
    """Each process's jobs and its share of the concurrency (0: no bound).

    Jobs are dealt to places in turn and places to processes in turn, so that each process has as many jobs a
    place as the others.
    """
    places = concurrency or processes
    shares: list[tuple[list[wire.Job], int]] = []
    for number in range(processes):
        mine = [job for i, job in enumerate(jobs) if i % places % processes == number]
        shares.append((mine, len(range(number, concurrency, processes)) if concurrency else 0))
    return shares


def run(works: list[wire.Work], on_progress: Callable[[int], None]) -> tuple[float, list[wire.Outcome]]:
    """Runs one process a Work. Returns the common start (CLOCK_MONOTONIC seconds) and the outcomes.

    Raises EngineDeadError where a client process ends by itself.
    """
    clients = [_Process(work) for work in works]
    news: queue.SimpleQueue[tuple[int, wire.ToParent | Exception]] = queue.SimpleQueue()
    try:
        for number, client in enumerate(clients):
            client.follow(number, news)
        outcomes: dict[int, wire.Outcome] = {}
        ready, start = 0, 0.0
        while len(outcomes) < len(clients):
            number, message = news.get()
            match message:
                case Exception():
                    code = clients[number].process.wait()
                    raise EngineDeadError("a client process has ended", got=f"exit code {code}: {message}")
                case wire.Ready():
                    ready += 1
                    if ready == len(clients):
                        start = time.monotonic() + START_DELAY
                        for client in clients:
                            wire.send(client.orders, wire.Go(start))
                case wire.Progress(done=done):
                    on_progress(done)
                case wire.Outcome():
                    outcomes[number] = message
        return start, [outcomes[i] for i in range(len(clients))]
    finally:
        for client in clients:
            client.stop()


class _Process:
    """A client process and its two pipes, which are read and written without buffers."""

    def __init__(self, work: wire.Work) -> None:
        self._work = work
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pegainfer.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._pipes = cast(tuple[IO[bytes], IO[bytes]], (self.process.stdin, self.process.stdout))
        self.orders, self._news = (pipe.fileno() for pipe in self._pipes)

    def follow(self, number: int, news: queue.SimpleQueue[tuple[int, wire.ToParent | Exception]]) -> None:
        """Hands the work over, then puts every message into `news`, and an exception where the process ends
        before its outcome. In a thread of its own: large works and outcomes do not wait for each other."""

        def body() -> None:
            try:
                wire.send(self.orders, self._work)
                while True:
                    message = wire.receive_news(self._news)
                    news.put((number, message))
                    if isinstance(message, wire.Outcome):
                        return
            except (EOFError, OSError) as error:
                news.put((number, error))

        threading.Thread(target=body, daemon=True).start()

    def stop(self) -> None:
        """Ends the process, which may have ended, and closes the pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in self._pipes:
            pipe.close()
