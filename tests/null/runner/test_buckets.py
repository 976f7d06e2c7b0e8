"""Every step fits its bucket, and no smaller one would do."""

from __future__ import annotations

import pytest

from pegainfer.contract.step import KVSpec, PageGroup, RunnerInfo
from pegainfer.runner.buckets import GRAPH_TOKENS, Buckets


def buckets(slots: int, tokens: int) -> Buckets:
    kv = KVSpec((PageGroup(name="kv", block_size=16, bytes_per_block=1),))
    return Buckets(
        RunnerInfo(
            kv=kv, num_blocks=(1,), max_slots=slots, max_tokens=tokens, max_model_len=4096, vocab_size=9
        )
    )


@pytest.mark.parametrize(("slots", "tokens"), [(1, 1), (3, 35), (64, 320), (256, 2304), (1000, 9192)])
def test_every_step_has_the_smallest_bucket(slots: int, tokens: int) -> None:
    b = buckets(slots, tokens)
    for sizes, most in ((b.batches, slots), (b.rows, slots), (b.tokens, tokens)):
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, slots + 1):
        batch = b.of(rows, rows, True)
        assert batch.env == {"T": b.batch(rows), "R": b.batch(rows), "L": b.batch(rows)}
        assert batch.tokens == min(n for n in b.batches if n >= rows)
    for n in range(1, tokens + 1, 7):
        found = b.of(n, min(n, slots), False)
        assert found.tokens == min(s for s in b.tokens if s >= n) and found.rows >= min(n, slots)
        assert found.graph is (found.tokens <= GRAPH_TOKENS)


def test_the_likeliest_sizes_come_first_and_all_come() -> None:
    b = buckets(24, 280)
    order = list(b.all())
    few, many = order[: len(b.batches) + len(b.tokens)], order[len(b.batches) + len(b.tokens) :]
    assert [x.rows for x in few if x.decode] == [1, 2, 4, 8, 16, 24]
    assert [x.tokens for x in few if not x.decode] == [16, 32, 64, 128, 256, 280]
    assert [x.tokens for x in few[:6]] == [1, 16, 2, 32, 4, 64]  # a first request finds what it needs
    assert few[0].env == {"T": 1, "R": 1, "L": 1} and few[-1].tokens == 280
    assert [(x.tokens, x.rows, x.decode) for x in many] == [(n, 24, False) for n in b.tokens]
    assert len(set(order)) == len(order)
    for tokens, rows in ((9, 9), (17, 3), (280, 24)):
        assert b.of(tokens, rows, False) in order
