"""Sends a share of the load on one event loop, in callbacks: a task a request would cost more than HTTP does.

arrival ──► queue (no place is free) ──► connection (idle or new) ──► written ──► answer ──► record
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine

from pegainfer.bench.answer import Answer
from pegainfer.bench.connection import Connection
from pegainfer.bench.wire import Job, Outcome, Record, Work

TICK_SECONDS = 0.02  # of the timer that measures how late the event loop is


class Client:
    """One run of a Work. `on_done` is called after each request."""

    def __init__(self, work: Work, on_done: Callable[[], None]) -> None:
        self.work = work
        self.on_done = on_done
        self.loop = asyncio.get_running_loop()
        self.ssl = _tls(work)
        self.records: list[Record] = []
        self._idle: list[Connection] = []
        self._jobs = deque(sorted(work.jobs, key=lambda job: job.at))
        self._queue: deque[tuple[Job, float]] = deque()  # with the time of arrival
        self._running = 0
        self._start = 0.0
        self._finished: asyncio.Future[None] = self.loop.create_future()
        self._late: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, start: float) -> Outcome:
        """Sends everything from `start` (CLOCK_MONOTONIC seconds) on and waits for the last answer."""
        lags: list[float] = []
        ticker = self._spawn(_measure_lag(lags))
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        self._start = start
        cpu = time.process_time()
        self._arrivals()
        if not self.work.jobs:
            self._finished.set_result(None)
        await self._finished
        ticker.cancel()
        for connection in self._idle:
            connection.close()
        return Outcome(
            records=self.records,
            cpu_seconds=time.process_time() - cpu,
            wall_seconds=time.monotonic() - start,
            lags=lags,
            late=self._late,
        )

    def finish(self, record: Record) -> None:
        """A request ended, well or not."""
        self.records.append(record)
        self._running -= 1
        self.on_done()
        self._pump(waited=True)
        if len(self.records) == len(self.work.jobs):
            self._finished.set_result(None)

    def take_back(self, connection: Connection) -> None:
        self._idle.append(connection)

    def idle_connection(self) -> Connection | None:
        """One that another request may use, taken out; None where each is busy or closed."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        self._spawn(work)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _arrivals(self) -> None:
        """Queues what is due and sets the timer for what is not."""
        now = time.monotonic()
        while self._jobs and self._start + self._jobs[0].at <= now:
            job = self._jobs.popleft()
            self._queue.append((job, self._start + job.at))
        self._pump(waited=False)
        if self._jobs:
            due = self._start + self._jobs[0].at - time.monotonic()
            self.loop.call_later(max(0.0, due), self._arrivals)

    def _pump(self, *, waited: bool) -> None:
        """Starts what has a place. `waited`: it had none when it arrived."""
        most = self.work.concurrency
        while self._queue and (most == 0 or self._running < most):
            job, arrived = self._queue.popleft()
            self._running += 1
            _Request(self, job, arrived, waited=waited).begin()

    def sent(self, lateness: float) -> None:
        self._late.append(lateness)


class _Request:
    """Implements connection.Exchange."""

    def __init__(self, client: Client, job: Job, arrived: float, *, waited: bool) -> None:
        self._client = client
        self._job = job
        self._arrived = arrived
        self._waited = waited  # for a place: not for the client
        self._record = Record(job.index, start=arrived)
        self._answer = Answer(self._record, stream=client.work.stream)
        self._connection: Connection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._retried = False

    def begin(self) -> None:
        work = self._client.work
        self._timer = self._client.loop.call_later(work.timeout, self._too_long)
        connection = self._client.idle_connection()
        if connection is not None:
            self._write(connection)
        else:
            self._client.spawn(self._connect())

    async def _connect(self) -> None:
        client = self._client
        work = client.work
        try:
            _, connection = await client.loop.create_connection(
                Connection, work.host, work.port, ssl=client.ssl
            )
        except OSError as error:
            self._done(f"no connection: {error.strerror or error}")
            return
        if self._timer is None:  # timed out meanwhile
            connection.close()
            return
        self._write(connection)

    def _write(self, connection: Connection) -> None:
        body = self._job.body
        data = b"%bContent-Length: %d\r\n\r\n%b" % (self._client.work.head, len(body), body)
        self._connection = connection
        record = self._record
        record.start = time.monotonic()
        record.queued = record.start - self._arrived
        if not self._waited:
            self._client.sent(record.queued)
        connection.request(data, self)

    def head(self, status: int, content_type: str) -> None:
        self._answer.head(status, content_type)

    def feed(self, data: bytes, now: float) -> None:
        self._answer.feed(data, now)

    def end(self, now: float, *, reusable: bool) -> None:
        if reusable and self._connection is not None:
            self._client.take_back(self._connection)
        self._answer.end(now)
        self._done("")

    def lost(self, reason: str, *, untouched: bool) -> None:
        if untouched and not self._retried:
            # The server closed an idle connection while the request was on its way: no fault of either.
            self._retried = True
            self._client.spawn(self._connect())
            return
        self._answer.fail(reason)
        self._answer.record.latency = time.monotonic() - self._record.start
        self._done(reason)

    def _too_long(self) -> None:
        if self._connection is not None:
            self._connection.abandon()
        self._done(f"no answer within {self._client.work.timeout:g} s")

    def _done(self, reason: str) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        if reason:
            self._answer.fail(reason)
        self._client.finish(self._record)


async def _measure_lag(lags: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.monotonic() - before - TICK_SECONDS))


def _tls(work: Work) -> ssl.SSLContext | None:
    if not work.tls:
        return None
    context = ssl.create_default_context()
    if not work.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
