"""Sizes that steps on a GPU are padded to, so that few graphs serve all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from pegainfer.contract.step import RunnerInfo

GRAPH_TOKENS = 512  # steps that are no decode are launched one kernel at a time above: the GPU is busy longer
FEW_ROWS = 8


@dataclass(frozen=True)
class Bucket:
    """T tokens in R rows of which L sample.

    Args:
        decode: each row is one token.
        adapted: a row has an adapter.
    """

    tokens: int
    rows: int
    decode: bool
    adapted: bool = False

    @property
    def env(self) -> dict[str, int]:
        return {"T": self.tokens, "R": self.rows, "L": self.rows}

    @property
    def graph(self) -> bool:
        return self.decode or self.tokens <= GRAPH_TOKENS


class Buckets:
    """Every bucket of a runner."""

    def __init__(self, info: RunnerInfo) -> None:
        slots, tokens = info.max_slots, info.max_tokens
        self.batches = _up_to(
            slots, [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(320, slots, 64)]
        )
        self.rows = _up_to(slots, [FEW_ROWS, 64])
        self.tokens = _up_to(tokens, [16, 32, 64, *range(128, 2560, 128), *range(2560, tokens, 512)])

    def of(self, tokens: int, rows: int, decode: bool, adapted: bool = False) -> Bucket:
        """The smallest that a step fits into; it must be within the runner's bounds."""
        if decode:
            batch = _fitting(self.batches, rows)
            return Bucket(batch, batch, True, adapted)
        return Bucket(_fitting(self.tokens, tokens), _fitting(self.rows, rows), False, adapted)

    def batch(self, rows: int) -> int:
        """Rows that a sampling step is padded to."""
        return _fitting(self.batches, rows)

    def all(self, adapted: bool = False) -> Iterator[Bucket]:
        """The likeliest first: decodes and prefills of few sequences in turn, then prefills beside many rows.

        Powers of two come before the sizes between them, which save padding. adapted: then the same for steps
        in which a row has an adapter.
        """
        yield from self._all()
        if adapted:
            yield from (replace(bucket, adapted=True) for bucket in self._all())

    def _all(self) -> Iterator[Bucket]:
        for between in (False, True):
            decodes = (Bucket(n, n, True) for n in self.batches if _between(n) is between)
            prefills = (Bucket(n, self.rows[0], False) for n in self.tokens if _between(n) is between)
            for pair in zip_longest(decodes, prefills):
                yield from (b for b in pair if b is not None)
        for fewer, rows in zip(self.rows, self.rows[1:], strict=False):
            for n in self.tokens:
                if n > fewer:
                    yield Bucket(n, rows, False)


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    return [n for n in sizes if n < most] + [most]


def _fitting(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


def _between(size: int) -> bool:
    return size & (size - 1) != 0
