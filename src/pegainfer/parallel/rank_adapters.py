"""Calls about the LoRA adapters of a rank in another process: the rank's end and the engine's end.

The rank keeps an adapter that it has read under the number of the call; the engine's process holds a
`RemoteAdapter` that stands for it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import EngineDeadError, PegaError, error_fields, restored_error
from pegainfer.contract.step import Runner
from pegainfer.parallel.channel import (
    AdapterCall,
    Answered,
    Channel,
    Failure,
    ForgetAdapter,
    InstallAdapter,
    ReadAdapter,
    RemoveAdapter,
    ToRank,
)
from pegainfer.parallel.part import adapter_runner

THREADS = 2  # of a rank that read and install adapters


def failure(error: Exception) -> Failure:
    """An error as the other end restores it."""
    if isinstance(error, PegaError):
        return Failure(*error_fields(error)[:2])
    return Failure("", f"{type(error).__name__}: {error}")


class RankAdapters:
    """The rank's end. Calls run on threads of their own, beside steps."""

    def __init__(self, runner: Runner, channel: Channel[ToRank]) -> None:
        self._runner, self._channel = runner, channel
        self._pool = ThreadPoolExecutor(THREADS, "adapters")
        self._read: dict[int, Any] = {}

    def take(self, message: AdapterCall | ForgetAdapter) -> None:
        """Starts what the message asks for."""
        if isinstance(message, ForgetAdapter):
            self._read.pop(message.adapter, None)
        else:
            self._pool.submit(self._answer, message)

    def _answer(self, message: AdapterCall) -> None:
        try:
            answer = Answered(message.call, info=self._serve(message))
        except Exception as error:
            answer = Answered(message.call, failure=failure(error))
        with contextlib.suppress(OSError):  # the engine's process is gone, and so will this one be
            self._channel.send(answer)

    def _serve(self, message: AdapterCall) -> AdapterInfo | None:
        runner = adapter_runner(self._runner)
        if isinstance(message, ReadAdapter):
            info, self._read[message.call] = runner.read_adapter(message.name, message.path)
            return info
        if isinstance(message, InstallAdapter):
            runner.install_adapter(message.index, self._read[message.adapter])
        else:
            runner.remove_adapter(message.index)
        return None


class RemoteAdapter:
    """Stands for an adapter that a rank has read; the rank drops it when this object is freed."""

    def __init__(self, number: int, forget: Callable[[int], None]) -> None:
        self.number = number
        weakref.finalize(self, forget, number)


class AdapterCalls:
    """The engine's end. For any thread."""

    def __init__(self, send: Callable[[AdapterCall | ForgetAdapter], None]) -> None:
        """`send` raises PegaError where the rank is gone."""
        self._send = send
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # of what waits
        self._waiting: dict[int, Future[AdapterInfo | None]] = {}
        self._death: PegaError | None = None

    def read(self, name: str, path: str) -> tuple[AdapterInfo, RemoteAdapter]:
        number = next(self._numbers)
        info = self._call(ReadAdapter(number, name, path))
        assert info is not None
        return info, RemoteAdapter(number, self._forget)

    def install(self, index: int, adapter: RemoteAdapter) -> None:
        self._call(InstallAdapter(next(self._numbers), index, adapter.number))

    def remove(self, index: int) -> None:
        self._call(RemoveAdapter(next(self._numbers), index))

    def _call(self, message: AdapterCall) -> AdapterInfo | None:
        answer: Future[AdapterInfo | None] = Future()
        with self._lock:
            if self._death is not None:
                raise self._death
            self._waiting[message.call] = answer
        self._send(message)
        return answer.result()

    def _forget(self, number: int) -> None:
        with contextlib.suppress(PegaError):
            self._send(ForgetAdapter(number))

    def take(self, message: Answered) -> None:
        """Hands an answer to the call that waits for it. Called by the thread that reads the channel."""
        with self._lock:
            answer = self._waiting.pop(message.call)
        if message.failure is None:
            answer.set_result(message.info)
        else:
            error = restored_error(message.failure.kind, message.failure.message)
            answer.set_exception(error or EngineDeadError(message.failure.message))

    def end(self, death: PegaError) -> None:
        """Ends all calls that wait, and later ones, with `death`."""
        with self._lock:
            waiting, self._waiting, self._death = list(self._waiting.values()), {}, death
        for answer in waiting:
            answer.set_exception(death)
