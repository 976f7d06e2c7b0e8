"""A rank in a process of its own, as the engine's process sees it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import EngineDeadError, PegaError, restored_error
from pegainfer.contract.step import RunnerInfo, StepPlan, StepResult
from pegainfer.parallel.channel import Answered, Channel, Failure, Forward, FromRank, Ready, Sample, ToRank
from pegainfer.parallel.rank_adapters import AdapterCalls, RemoteAdapter
from pegainfer.runtime.rank_memory import RankMemory

END_SECONDS = 5.0  # for a process to end, and for a rank to notice that the group has failed
LOOK_SECONDS = 0.5  # how often one who waits for a rank looks whether the group has failed


class RankProcess:
    """Implements contract.step.Runner and AdapterRunner. The process ends with this one, whatever ends this.

    Args:
        command: starts the rank; the descriptors of its end of the channel and of the group's memory, and
            `order`, are appended.
        order: text that says what to load.
        rank: of the process.
        info: of the rank, once it is ready.
        memory: of the group, as this process maps it.
    """

    def __init__(
        self, command: Sequence[str], order: str, rank: int, info: RunnerInfo, memory: RankMemory
    ) -> None:
        self._info, self.rank, self._memory = info, rank, memory
        ours, theirs = socket.socketpair()
        self._channel: Channel[FromRank] = Channel(ours, FromRank)
        self._channel.limit_sends(memory.seconds)
        with theirs:
            fds = theirs.fileno(), memory.fd
            self.process = subprocess.Popen(
                [*command, *map(str, fds), order], pass_fds=fds, stdin=subprocess.DEVNULL
            )
        self._adapters = AdapterCalls(self._send)
        self._lock = threading.Lock()  # of what follows
        self._ready: Future[None] = Future()
        self._steps: deque[Future[StepResult]] = deque()  # sampled and not answered
        self._death: PegaError | None = None
        self._reader = threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True)
        self._reader.start()

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def wait_ready(self, seconds: float | None = None) -> None:
        """Returns when the rank has loaded its part. Raises what kept it from that, TimeoutError after
        `seconds`."""
        self._ready.result(seconds)

    def forward(self, plan: StepPlan) -> None:
        self._send(Forward(plan))

    def sample(self, handle: None, masks: dict[int, bytes] | None = None) -> RankStep:
        step: Future[StepResult] = Future()
        with self._lock:
            if self._death is None:
                self._steps.append(step)
        self._send(Sample(masks))
        return RankStep(self, step)

    def read_adapter(self, name: str, path: str) -> tuple[AdapterInfo, RemoteAdapter]:
        return self._adapters.read(name, path)

    def install_adapter(self, index: int, adapter: RemoteAdapter) -> None:
        self._adapters.install(index, adapter)

    def remove_adapter(self, index: int) -> None:
        self._adapters.remove(index)

    def close(self) -> None:
        """Ends the process, by force where it does not end by itself; idempotent."""
        with self._lock:
            self._death = self._death or EngineDeadError(f"rank {self.rank} was closed")
        self._memory.fail(self.rank)  # a step that is under way elsewhere does not wait for it
        self._channel.hang_up()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()
        self._channel.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def no_answer(self) -> EngineDeadError:
        """The error of a rank that is there and does not answer; it is killed."""
        self._memory.fail(self.rank)
        error = EngineDeadError(
            f"rank {self.rank} does not answer", got=f"nothing from process {self.process.pid}",
            remedy="restart the server",
        )  # fmt: skip
        with self._lock:
            self._death = self._death or error
        self.kill()
        return error

    @property
    def seconds(self) -> float:
        """How long a step may still take when all other ranks have ended it."""
        return END_SECONDS if self._memory.has_failed else self._memory.seconds

    def _send(self, message: ToRank) -> None:
        if self._death is not None:
            raise self._death
        try:
            self._channel.send(message)
        except BlockingIOError:
            raise self.no_answer() from None
        except OSError:
            self._reader.join(END_SECONDS)  # it knows how the process has ended
            raise self._death or self.no_answer() from None

    # The reader's thread

    def _read(self) -> None:
        for message in self._channel.receive():
            if isinstance(message, Ready):
                self._ready.set_result(None)
                continue
            if isinstance(message, Answered):
                self._adapters.take(message)
                continue
            error = restored_error(message.kind, message.message) if isinstance(message, Failure) else None
            if not self._ready.done():
                self._ready.set_exception(error or EngineDeadError(f"rank {self.rank} is not ready"))
                continue
            with self._lock:
                step = self._steps.popleft()
            if isinstance(message, Failure):
                step.set_exception(error or EngineDeadError(message.message))
            else:
                step.set_result(message.result)
        self._end()

    def _end(self) -> None:
        """The process has closed its end: nothing that waits for it will be answered."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        with self._lock:
            if self._death is None:
                self._memory.fail(self.rank)
                self._death = EngineDeadError(
                    f"rank {self.rank} has ended", got=_how(self.process.returncode),
                    where=f"process {self.process.pid}", remedy="restart the server",
                )  # fmt: skip
            death, steps = self._death, list(self._steps)
            self._steps.clear()
        if not self._ready.done():
            self._ready.set_exception(death)
        self._adapters.end(death)
        for step in steps:
            step.set_exception(death)


class RankStep:
    """A step under way in a rank's process."""

    def __init__(self, rank: RankProcess, step: Future[StepResult]) -> None:
        self._rank, self._step = rank, step

    def done(self) -> bool:
        return self._step.done()

    def wait(self) -> StepResult:
        """Blocks until the result has come. Raises what the rank raised, EngineDeadError where it is gone."""
        started = time.monotonic()
        while time.monotonic() - started < self._rank.seconds:
            with contextlib.suppress(TimeoutError):
                return self._step.result(LOOK_SECONDS)
        raise self._rank.no_answer()


def _how(code: int | None) -> str:
    """How a process has ended, from Popen's exit code."""
    if code is None:
        return "no exit code yet"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
