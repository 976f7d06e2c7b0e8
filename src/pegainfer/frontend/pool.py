"""Worker processes for jobs with a deadline: a thread cannot be killed, a process can."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from pegainfer.contract.errors import QueueFullError, RequestError
from pegainfer.contract.frames import frame_of, read_frame
from pegainfer.frontend.grammar.compiler import GrammarJob
from pegainfer.frontend.worker import Job, Outcome, Setup, WarmJob

START_SECONDS = 60.0  # for a process to start on a busy machine
MAX_JOBS = 128  # that run or wait


class WorkerFailedError(Exception):
    """A worker was killed at its deadline, or ended by itself. `late` tells which."""

    def __init__(self, *, late: bool) -> None:
        super().__init__("late" if late else "ended")
        self.late = late


class _Process:
    """One worker process."""

    def __init__(self, setup: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pegainfer.frontend.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.warm = False  # whether it has made what grammars need
        self.call(setup, START_SECONDS)

    def call(self, body: bytes, seconds: float) -> bytes:
        """The answer to one frame. Raises WorkerFailedError; the process is gone then."""
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Event()
        timer = threading.Timer(seconds, self._kill, [late])
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(frame_of(body))
            self._process.stdin.flush()
            answer = read_frame(self._process.stdout.read)
        except (OSError, EOFError):
            answer = b""
        finally:
            timer.cancel()
        if not answer:
            self.close()
            raise WorkerFailedError(late=late.is_set())
        return answer

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def _kill(self, late: threading.Event) -> None:
        late.set()
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was still to be written has no reader any more
                    stream.close()


class WorkerPool:
    """Starts its processes as jobs come, at most `size`. Safe to use from any thread or event loop."""

    def __init__(self, setup: Callable[[], Setup], size: int = 2) -> None:
        self._setup = setup
        self._encoded: bytes | None = None
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: list[_Process] = []  # those that are gone, too, until others are started
        self._places = threading.BoundedSemaphore(MAX_JOBS)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="workers")
        self._close = weakref.finalize(self, _kill, self._all, self._threads)

    async def run(self, job: Job, seconds: float, what: str) -> str:
        """A job's text.

        Args:
            seconds: after which the worker is killed; waiting for a worker does not count.
            what: is worked on, for messages.

        Raises RequestError where the job is at fault, takes too long or ends its worker; QueueFullError.
        """
        if not self._places.acquire(blocking=False):
            raise QueueFullError(f"too many requests wait for {what}", got=MAX_JOBS)
        try:
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(self._threads, self._run, job, seconds)
        except WorkerFailedError as error:
            limit = f"at most {seconds:g} s of work" if error.late else "less memory and nesting"
            raise RequestError(f"{what} asks for too much", expected=limit) from None
        finally:
            self._places.release()
        if outcome.error is not None:
            raise RequestError(f"{what}: {outcome.error}", param=outcome.param)
        return outcome.text

    def _run(self, job: Job, seconds: float) -> Outcome:
        with self._lock:
            process = self._idle.pop() if self._idle else None
            if self._encoded is None:
                self._encoded = msgspec.msgpack.encode(self._setup())
        if process is None:
            process = _Process(self._encoded)
            with self._lock:
                self._all[:] = [*(p for p in self._all if p.alive), process]
        if isinstance(job, GrammarJob) and not process.warm:
            process.call(msgspec.msgpack.encode(WarmJob()), START_SECONDS)
            process.warm = True
        answer = process.call(msgspec.msgpack.encode(job), seconds)
        with self._lock:
            self._idle.append(process)
        return msgspec.msgpack.decode(answer, type=Outcome)

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        self._close()
        self._threads.shutdown(wait=True)
        for process in self._all:
            process.close()


def _kill(processes: list[_Process], threads: ThreadPoolExecutor) -> None:
    """Ends what runs, without waiting for it.

    The garbage collector may call this in a thread that is being started, which holds a lock of `threading`
    that every ending thread needs: waiting for one there would never end.
    """
    threads.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()  # a thread that waits for the answer gets an error at once
