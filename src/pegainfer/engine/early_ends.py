"""What ends a request other than its tokens: a cancel, a deadline, or that it asks for no token."""

from __future__ import annotations

import heapq

from pegainfer.contract.errors import DeadlineError
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.outcomes import Outcomes
from pegainfer.engine.sequence import Sequence

SPARE_DEADLINES = 64  # entries of ended requests that the heap may hold, beside as many as live ones


def passed(deadline: float, now: float) -> DeadlineError:
    """What ends a request at its own deadline."""
    return DeadlineError(f"the request's deadline passed {now - deadline:.3f} s ago")


def not_started(max_wait: float) -> DeadlineError:
    """What ends a request that has waited for `max_wait` seconds."""
    return DeadlineError(f"the request was not started within {max_wait:g} s", remedy="try again later")


class EarlyEnds:
    """Gathers reasons between two steps; `apply` ends what has one, before the next plan is made."""

    def __init__(self, config: SchedulerConfig, outcomes: Outcomes) -> None:
        self._max_wait = config.max_wait_seconds
        self._outcomes = outcomes
        # The family, too: another request may have the id when a cancel that had to wait can be obeyed.
        self._cancels: list[tuple[str, int | None, list[Sequence]]] = []
        self._instant: list[str] = []  # requests that ask for no token
        self._deadlines: list[tuple[float, str]] = []  # a heap; entries of ended requests are dropped late

    def watch(self, family: list[Sequence], now: float) -> None:
        """A request's sequences were opened at `now` (seconds)."""
        first = family[0]
        if first.request.deadline is not None:
            self._push(first.request.deadline, first.request_id)
        if self._max_wait:
            self._push(now + self._max_wait, first.request_id)
        if first.limit == first.num_prompt:
            self._instant.append(first.request_id)

    def cancel(self, request_id: str, index: int | None) -> None:
        """Ends a request's sequences, or the one of `index`, at the next `apply`; unknown ids are ignored."""
        family = self._outcomes.live.get(request_id)
        if family is not None:
            self._cancels.append((request_id, index, family))

    def apply(self, now: float, events: list[TokenEvent]) -> None:
        """Ends what must end by `now` (seconds) and appends the finish events."""
        if self._cancels:
            self._apply_cancels(now, events)
        if self._instant:
            self._apply_instant(now, events)
        while self._deadlines and self._deadlines[0][0] <= now:
            self._expire(*heapq.heappop(self._deadlines), now, events)

    def _apply_cancels(self, now: float, events: list[TokenEvent]) -> None:
        cancels, self._cancels = self._cancels, []
        for request_id, index, family in cancels:
            if self._outcomes.live.get(request_id) is not family:
                continue
            if index is None:
                self._outcomes.end_request(request_id, FinishReason.ABORT, now, events)
            elif not self._outcomes.end_one(request_id, index, now, events):
                self._cancels.append((request_id, index, family))

    def _apply_instant(self, now: float, events: list[TokenEvent]) -> None:
        """Those that want the logprobs of their prompts end once these are computed."""
        for request_id in self._instant:
            for seq in tuple(self._outcomes.live.get(request_id, ())):
                if seq.prompt_logprobs is None or seq.num_prompt == 1:
                    events.append(self._outcomes.finish(seq, FinishReason.LENGTH, now))
        self._instant.clear()

    def _push(self, deadline: float, request_id: str) -> None:
        live = self._outcomes.live
        if len(self._deadlines) > SPARE_DEADLINES + 2 * len(live):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, request_id))

    def _expire(self, deadline: float, request_id: str, now: float, events: list[TokenEvent]) -> None:
        late = self._late(self._outcomes.live.get(request_id, []), deadline, now)
        if late is not None:
            self._outcomes.end_request(
                request_id, FinishReason.ERROR, now, events, error=str(late), error_kind=type(late).__name__
            )

    def _late(self, family: list[Sequence], deadline: float, now: float) -> DeadlineError | None:
        """Why a request ends now; None where the deadline was of another of its name, or is kept."""
        if not family:
            return None
        first = family[0]
        if first.request.deadline == deadline:
            return passed(deadline, now)
        overdue = self._max_wait and first.admitted + self._max_wait == deadline
        if overdue and not any(seq.entered for seq in family):
            return not_started(self._max_wait)
        return None
