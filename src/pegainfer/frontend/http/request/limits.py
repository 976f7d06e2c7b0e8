"""Bounds on what a request may ask for, and on how many may wait at once."""

from __future__ import annotations

from pegainfer.contract.errors import QueueFullError
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.connection.keys import digests
from pegainfer.frontend.http.errors import ApiError

RETRY_SECONDS = 1.0  # a full queue is usually shorter a second later


def bad_value(param: str, expected: object, got: object, *, code: str | None = None) -> ApiError:
    """`code`: for clients that tell errors apart by it."""
    return ApiError(400, f"{param}: expected {expected}, got {got}", param=param, code=code)


def unsupported(param: str, what: str = "", *, remedy: str = "") -> ApiError:
    """For what others serve: the field itself, or `what` it asks for. `remedy`: what to send instead."""
    said = f"{what} is not" if what else "not"
    message = f"{param}: {said} supported yet by this server" + (f"; {remedy}" if remedy else "")
    return ApiError(400, message, param=param, code="unsupported")


def in_range(param: str, value: float, low: float, high: float) -> None:
    """Raises ApiError (400) unless low ≤ value ≤ high."""
    if not low <= value <= high:
        raise bad_value(param, f"{low} ≤ {param} ≤ {high}", value)


def at_most(param: str, items: int, limit: int, what: str) -> None:
    """Raises ApiError (400) unless items ≤ limit; `what` they are, as "bytes"."""
    if items > limit:
        raise bad_value(param, f"≤ {limit} {what}", items)


class Held:
    """Counts the bytes of the bodies of all requests that are being answered."""

    def __init__(self, config: HttpConfig) -> None:
        self._most = config.max_held_bytes
        self.num_bytes = 0

    def add(self, size: int) -> None:
        """Raises QueueFullError where it is too much; it counts all the same."""
        self.num_bytes += size
        if self.num_bytes > self._most:
            raise QueueFullError(
                "the requests under way are too large together",
                expected=f"≤ {self._most} bytes",
                got=self.num_bytes,
                remedy="retry later",
                retry_after=RETRY_SECONDS,
            )


class Gate:
    """Counts the prompts that wait for their first token, and refuses what would be too many.

    take(k prompts) ──► waiting += k ──► release(one) at its first event or its end, exactly once each

    Where there are several keys, one may take no more places than are left free: it alone fills half of the
    queue, and there is always room for another.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._several_keys = len(digests(config.api_key)) > 1
        self._shares: dict[str, tuple[int, int]] = {}  # requests and tokens that wait, by tenant
        self.waiting_requests = 0
        self.waiting_tokens = 0
        self.draining = False

    @property
    def full(self) -> bool:
        return self.waiting_requests >= self._max_requests

    def take(self, lengths: list[int], tenant: str) -> None:
        """Admits a tenant's prompts of these lengths (tokens), all or none.

        Raises QueueFullError, and ApiError (429) where others may still send.
        """
        if self.draining:
            raise QueueFullError("the server is shutting down", retry_after=5.0)
        requests = self.waiting_requests + len(lengths)
        if requests > self._max_requests:
            raise QueueFullError(
                "the queue is full",
                expected=f"≤ {self._max_requests} waiting prompts",
                got=requests,
                remedy="retry later",
                retry_after=RETRY_SECONDS,
            )
        tokens = self.waiting_tokens + sum(lengths)
        # A prompt alone is never too long for the queue: the context's length has bounded it already.
        if tokens > self._max_tokens and self.waiting_requests:
            raise QueueFullError(
                "the queue is full",
                expected=f"≤ {self._max_tokens} waiting prompt tokens",
                got=tokens,
                remedy="retry later",
                retry_after=RETRY_SECONDS,
            )
        if self._several_keys:
            self._take_share(tenant, len(lengths), sum(lengths))
        self.waiting_requests, self.waiting_tokens = requests, tokens

    def _take_share(self, tenant: str, requests: int, tokens: int) -> None:
        own_requests, own_tokens = self._shares.get(tenant, (0, 0))
        share = own_requests + requests, own_tokens + tokens
        for what, own, free in (
            ("prompts", share[0], self._max_requests - self.waiting_requests),
            ("prompt tokens", share[1], self._max_tokens - self.waiting_tokens),
        ):
            if own > free and own_requests:
                raise ApiError(
                    429,
                    f"this key's share of the queue is full; expected ≤ {free} waiting {what}, got {own}; "
                    "remedy: retry later",
                    code="rate_limited",
                    retry_after=RETRY_SECONDS,
                )
        self._shares[tenant] = share

    def release(self, length: int, tenant: str) -> None:
        """One prompt of this length waits no more."""
        self.waiting_requests -= 1
        self.waiting_tokens -= length
        assert self.waiting_requests >= 0 and self.waiting_tokens >= 0
        if self._several_keys:
            requests, tokens = self._shares[tenant]
            if requests == 1:
                del self._shares[tenant]
            else:
                self._shares[tenant] = requests - 1, tokens - length
