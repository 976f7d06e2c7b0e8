"""How quickly the server answers a trivial question while it is under load."""

from __future__ import annotations

import http.client
import ssl
import threading
import time

import numpy as np

from pegainfer.bench.target import Target

PERIOD_SECONDS = 0.05
TIMEOUT_SECONDS = 10.0


class HealthProbe:
    """Asks GET /health on a connection of its own, in a thread, between `start` and `stop`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seconds: list[float] = []  # of each answer with status 200
        self.failed = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def percentile(self, p: float) -> float:
        """Milliseconds."""
        return float(np.percentile(self.seconds, p)) * 1000 if self.seconds else 0.0

    def _run(self) -> None:
        connection = self._target.connect(TIMEOUT_SECONDS)
        while not self._stop.wait(PERIOD_SECONDS):
            begin = time.monotonic()
            try:
                connection.request("GET", self._target.path("/health"))
                answer = connection.getresponse()
                answer.read()
                ok = answer.status == 200
            except (OSError, http.client.HTTPException, ssl.SSLError):
                connection.close()  # the next request opens it anew
                ok = False
            if ok:
                self.seconds.append(time.monotonic() - begin)
            else:
                self.failed += 1
        connection.close()
