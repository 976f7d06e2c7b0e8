"""One line in the log for every request that is refused or fails, with its reason. A flood is summed up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pegainfer.contract.observation import FailureObserver, RequestRecord

log = logging.getLogger("pegainfer.requests")

BURST = 20  # lines at once
PER_SECOND = 1.0  # lines after that
MAX_REASON = 300  # characters


class ConsoleLines(FailureObserver):
    """Writes failed requests into the log. A reason may quote a value of the request, as the answer does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowed = float(BURST)
        self._asked = clock()
        self._left_out = 0

    def __call__(self, record: RequestRecord) -> None:
        # "Not ready" is an ordinary answer to the probe that asks for it, every few seconds.
        if record.path == "/ready" and record.status == 503:
            return
        if record.error or record.status >= 400:
            now = self._clock()
            self._allowed = min(BURST, self._allowed + (now - self._asked) * PER_SECOND)
            self._asked = now
            if self._allowed < 1.0:
                self._left_out += 1
                return
            self._allowed -= 1.0
            self._sum_up()
            log.log(logging.ERROR if record.status >= 500 else logging.WARNING, "%s", _line(record))

    def close(self) -> None:
        """Says how many lines were left out since the last one."""
        self._sum_up()

    def _sum_up(self) -> None:
        if self._left_out:
            log.warning("%d more requests were refused or failed", self._left_out)
            self._left_out = 0


def _line(record: RequestRecord) -> str:
    """'400 POST /v1/completions from 127.0.0.1: temperature: …', of printable characters alone."""
    what = " ".join(part for part in (str(record.status or "-"), record.method, record.path) if part)
    origin = f" from {record.client}" if record.client else ""
    reason = record.error if len(record.error) <= MAX_REASON else record.error[:MAX_REASON] + "…"
    line = f"{what}{origin}: {reason or 'no reason is known'}"
    return "".join(c if c.isprintable() else " " for c in line)
