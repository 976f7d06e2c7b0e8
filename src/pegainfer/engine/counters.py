"""What the scheduler counts; every field of EngineStats that it can know."""

from __future__ import annotations

from bisect import bisect_left

from pegainfer.contract.event import PRICE_RATIOS, SLOW_RATIO, FinishReason

# Retry-After in seconds: a guess from the pace at which requests finish, kept within what clients accept.
MIN_RETRY, MAX_RETRY = 1.0, 60.0
PACE_WEIGHT = 0.1  # of the newest gap between two finishes

KINDS = ("decode", "prefill", "mixed")
NUM_SIZES = 17  # step sizes are counted by powers of two, up to 2^15 tokens and above


class Counters:
    """Totals since the start, and the pace of finishes."""

    def __init__(self) -> None:
        self.steps = 0
        self.last_step = 0.0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.rejections = 0
        self.step_seconds = 0.0
        self.kind_steps = dict.fromkeys(KINDS, 0)
        self.kind_seconds = dict.fromkeys(KINDS, 0.0)
        self.step_sizes = [0] * NUM_SIZES
        self.step_tokens = 0
        self.price_ratios = [0] * (len(PRICE_RATIOS) + 1)
        self.price_ratio_sum = 0.0
        self.slow_steps = 0
        self.finished = {reason.value: 0 for reason in FinishReason}
        self._last_finish = 0.0
        self._gap = 0.0  # smoothed seconds between two finishes

    def step(self, prefill_tokens: int, decode_tokens: int, seconds: float, now: float) -> None:
        """A step was committed at `now`; it took the device so many seconds.

        Args:
            prefill_tokens, decode_tokens: positions that its rows computed.
        """
        self.steps += 1
        self.last_step = now
        self.step_seconds += seconds
        kind = KINDS[0] if not prefill_tokens else KINDS[1] if not decode_tokens else KINDS[2]
        self.kind_steps[kind] += 1
        self.kind_seconds[kind] += seconds
        tokens = prefill_tokens + decode_tokens
        self.step_sizes[min(tokens.bit_length(), NUM_SIZES - 1)] += 1
        self.step_tokens += tokens

    def priced(self, ratio: float) -> None:
        """A step took `ratio` times its price."""
        self.price_ratios[bisect_left(PRICE_RATIOS, ratio)] += 1
        self.price_ratio_sum += ratio
        self.slow_steps += ratio >= SLOW_RATIO

    def finish(self, reason: FinishReason, now: float) -> None:
        """A continuation ended at `now` (seconds)."""
        self.finished[reason.value] += 1
        if self._last_finish:
            gap = now - self._last_finish
            self._gap += PACE_WEIGHT * (gap - self._gap) if self._gap else gap
        self._last_finish = now

    def retry_after(self, waiting: int) -> float:
        """Seconds until so many requests may have been served."""
        return min(MAX_RETRY, max(MIN_RETRY, self._gap * waiting))
