"""Says where an engine stands that does not move: which plan it works on, and the stack of every thread."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from pegainfer.contract.step import StepPlan

log = logging.getLogger(__name__)

MAX_PLAN_CHARS = 4000  # a plan of many rows is cut


class Progress(NamedTuple):
    """Where the engine's loop is."""

    turns: int  # rounds that have ended
    resting: bool  # it sleeps because there is nothing to do
    plan: StepPlan | None  # the last one that was launched


class Watchdog:
    """Compares one look at the loop with the next.

    Reports once when a round has taken longer than `seconds`, and once when it has ended after all.
    """

    def __init__(
        self, progress: Callable[[], Progress], seconds: float, report: Callable[[str], None] = log.error
    ) -> None:
        self._progress = progress
        self._seconds = seconds
        self._report = report
        self._turns = -1
        self._since = 0.0  # seconds of the clock when the current round was first seen
        self._reported = False

    def look(self, now: float) -> None:
        """Compares with the last look, and reports what is to be reported."""
        at = self._progress()
        if at.turns != self._turns or at.resting:
            if self._reported:
                self._report(f"the engine moves again after {now - self._since:.1f} s")
            self._turns, self._since, self._reported = at.turns, now, False
        elif not self._reported and now - self._since >= self._seconds:
            self._reported = True
            self._report(
                f"the engine has made no step for {now - self._since:.1f} s; "
                f"its last plan: {describe_plan(at.plan)}\n{stacks()}"
            )


@contextlib.contextmanager
def watching(progress: Callable[[], Progress], seconds: float) -> Iterator[None]:
    """A watchdog on a thread of its own while the context lasts; none for 0 seconds."""
    if not seconds:
        yield
        return
    dog, ended = Watchdog(progress, seconds), threading.Event()

    def main() -> None:
        while not ended.wait(seconds / 4):
            dog.look(time.monotonic())

    thread = threading.Thread(target=main, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def describe_plan(plan: StepPlan | None) -> str:
    """The numbers of a plan and then the plan itself; prompts are left out."""
    if plan is None:
        return "none yet"
    news = tuple(msgspec.structs.replace(new, tokens=b"") for new in plan.news)
    text = msgspec.json.encode(msgspec.structs.replace(plan, news=news)).decode()
    if len(text) > MAX_PLAN_CHARS:
        text = text[:MAX_PLAN_CHARS] + "…"
    return f"step {plan.step}, {len(plan.rows)} rows, {plan.num_tokens} tokens: {text}"


def stacks() -> str:
    """Every thread's stack, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "".join(parts)
