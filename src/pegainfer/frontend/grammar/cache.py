"""Grammars that were checked, and their faults: who asks again, or many that ask at once, pay once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from pegainfer.contract.errors import RequestError
from pegainfer.contract.request import GrammarSpec
from pegainfer.frontend.grammar.compiler import GrammarJob
from pegainfer.frontend.pool import WorkerPool

MAX_KEPT = 512
MAX_KEPT_CHARS = 16 << 20  # of all kept grammars together


class GrammarCache:
    """Belongs to one event loop."""

    def __init__(self, workers: WorkerPool, seconds: float) -> None:
        """
        Args:
            seconds: a compile may take.
        """
        self._workers = workers
        self._seconds = seconds
        self._kept: OrderedDict[GrammarJob, GrammarSpec | str] = OrderedDict()  # or what is wrong with it
        self._chars = 0
        self._running: dict[GrammarJob, asyncio.Task[GrammarSpec]] = {}

    async def get(self, job: GrammarJob) -> GrammarSpec:
        """The engine's form of a grammar. Raises RequestError, QueueFullError."""
        kept = self._kept.get(job)
        if kept is not None:
            self._kept.move_to_end(job)
            if isinstance(kept, str):
                raise RequestError(kept)
            return kept
        task = self._running.get(job)
        if task is None:
            task = self._running[job] = asyncio.ensure_future(self._compile(job))
            task.add_done_callback(lambda task: self._ended(job, task))
        return await asyncio.shield(task)  # one client that leaves does not end it for the others

    async def _compile(self, job: GrammarJob) -> GrammarSpec:
        return GrammarSpec(job.kind, await self._workers.run(job, self._seconds, "the grammar"))

    def _ended(self, job: GrammarJob, task: asyncio.Task[GrammarSpec]) -> None:
        del self._running[job]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._keep(job, task.result())
        elif isinstance(error, RequestError):
            self._keep(job, str(error))

    def _keep(self, job: GrammarJob, found: GrammarSpec | str) -> None:
        self._kept[job] = found
        self._chars += _size(job, found)
        while len(self._kept) > MAX_KEPT or self._chars > MAX_KEPT_CHARS:
            self._chars -= _size(*self._kept.popitem(last=False))


def _size(job: GrammarJob, found: GrammarSpec | str) -> int:
    return len(job.text) + len(found if isinstance(found, str) else found.text)
