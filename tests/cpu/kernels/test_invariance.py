"""A token's logits are equal bit for bit at any batch, chunk, thread count and place in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pegainfer.kernels.cpu.library import has_bf16
from pegainfer.lower.cpu.backend import CpuOptions
from tests.cpu.kernels.harness import FORMATS, ISAS
from tests.cpu.kernels.model import BLOCK_SIZE, BLOCKS, CONFIG, Array, Model, Span

LENGTHS = (1, 2, 15, 16, 17, 33, 129, 300)  # tokens; the last ones span several segments of attention
VARIANTS = [
    *((isa, activation, FORMATS, "f32") for isa in ISAS for activation in ("int8", "f32")),
    *((isa, "int8", ("q4_1", "q8_0"), "f16") for isa in ISAS),
    *((isa, "int8", ("q4_1", "q8_0"), "f8_e4m3") for isa in ISAS),
    *((isa, "bf16", ("bf16",), "f16") for isa in ISAS if has_bf16(isa)),
]


def sequences(rng: np.random.Generator) -> list[tuple[Array, Array]]:
    """(ids, blocks) of each length; blocks in no order."""
    pages = iter(rng.permutation(BLOCKS))
    return [
        (
            rng.integers(0, CONFIG.vocab_size, n).astype(np.int32),
            np.array([next(pages) for _ in range(-(-n // BLOCK_SIZE))], np.int64),
        )
        for n in LENGTHS
    ]


def alone(model: Model, ids: Array, blocks: Array) -> Array:
    return model.logits([Span(ids, blocks, 0, len(ids))])


def in_chunks(model: Model, ids: Array, blocks: Array, sizes: Iterator[int]) -> Array:
    parts, at = [], 0
    while at < len(ids):
        count = min(next(sizes), len(ids) - at)
        parts.append(model.logits([Span(ids, blocks, at, count)]))
        at += count
    return np.concatenate(parts)


@pytest.mark.parametrize(("isa", "activation", "formats", "kv_dtype"), VARIANTS)
def test_any_batch_chunk_and_thread_count(
    isa: str, activation: str, formats: tuple[str, ...], kv_dtype: str
) -> None:
    rng = np.random.default_rng(11)
    plain = Model(CpuOptions(1, isa, activation), formats, kv_dtype)  # type: ignore[arg-type]
    given = sequences(rng)
    want = [alone(plain, *s) for s in given]
    assert all(np.isfinite(w).all() for w in want)
    for threads in (1, 2, 3, 5):
        model = Model(CpuOptions(threads, isa, activation), formats, kv_dtype)  # type: ignore[arg-type]
        together = model.logits([Span(ids, blocks, 0, len(ids)) for ids, blocks in given])
        for w, got in zip(want, np.split(together, np.cumsum(LENGTHS)[:-1]), strict=True):
            assert got.tobytes() == w.tobytes()
        moved = sequences(rng)
        for (ids, _), (_, blocks), w in zip(given, moved, want, strict=True):
            sizes = iter(rng.integers(1, 50, 400).tolist())
            assert in_chunks(model, ids, blocks, sizes).tobytes() == w.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_decodes_beside_prefill(isa: str) -> None:
    """One token at a time for all sequences at once, while another is prefilled in the same steps."""
    rng = np.random.default_rng(3)
    model, other = (Model(CpuOptions(threads, isa), FORMATS) for threads in (2, 1))
    given = sequences(rng)
    want = [alone(other, *s) for s in given]
    long_ids, long_blocks = given[-1]
    got: list[list[Array]] = [[] for _ in given[:-1]]
    for at in range(max(LENGTHS[:-1])):
        running = [i for i, n in enumerate(LENGTHS[:-1]) if at < n]
        spans = [Span(*given[i], at, 1) for i in running]
        start = 2 * at
        if start + 2 <= len(long_ids):
            spans.append(Span(long_ids, long_blocks, start, 2))
        rows = model.logits(spans)
        for i, row in zip(running, rows, strict=False):
            got[i].append(row)
    for w, parts in zip(want[:-1], got, strict=True):
        assert np.stack(parts).tobytes() == w.tobytes()
