"""Hostile inputs of the sampling ops: ties, masks that leave one token or none, long histories, NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.common import U, i32, normal
from pegainfer.ops.spec import Arrays, Case

Array = np.ndarray[Any, Any]
# Rows, ids, columns: those behind the ids are padding, in which anything may stand.
SHAPES = (
    (0, 40, 40), (1, 1, 1), (1, 33, 40), (3, 64, 64), (9, 257, 257), (9, 257, 320), (2, 4099, 8200),
    (70, 50, 56),
)  # fmt: skip
WIDE = (40, 513, 520)


def _flat(parts: list[list[Any]], dtype: type) -> tuple[Array, Array, Array]:
    """Lists end to end, their starts, their lengths."""
    lens = i32([len(p) for p in parts])
    return np.array([x for p in parts for x in p], dtype), i32(np.cumsum(lens) - lens), lens


def _logits(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    """[L, V] of a trained model's spread; some rows of equals, ties, zeros of both signs, or one peak."""
    x = normal(rng, (rows, vocab)) * np.float32(4)
    for row in range(rows):
        match row % 7:
            case 2:
                x[row] = x[row, 0]
            case 3:
                x[row] = np.round(x[row])
            case 4:
                x[row] = np.where(rng.random(vocab) < 0.5, np.float32(-0.0), np.float32(0.0))
            case 5:
                x[row, vocab - 1] = 1e4
            case 6:
                x[row, rng.random(vocab) < 0.5] = -np.inf
                x[row, 0] = 0
    return x


def _spoil(rng: np.random.Generator, logits: Array) -> None:
    """In place: some rows get a NaN, +inf, or nothing but -inf; their neighbours must not mind."""
    rows, vocab = logits.shape
    for row, bad in ((4, np.nan), (6, np.inf), (8, -np.inf)):
        if row < rows:
            logits[row, slice(None) if bad == -np.inf else rng.integers(vocab)] = bad


def _padded(rng: np.random.Generator, logits: Array, columns: int) -> Array:
    """Behind the ids: the greatest values, NaN and infinities, none of which may be read."""
    rows, vocab = logits.shape
    rest = rng.choice(np.array([1e30, np.nan, np.inf, -np.inf, 0], np.float32), (rows, columns - vocab))
    return np.concatenate([logits, rest], axis=1)


def _history(rng: np.random.Generator, rows: int, vocab: int) -> Arrays:
    """A table larger than the rows, slots in no order, ids out of range where no token is known."""
    slots, room = rows + 2, 37
    table = np.full((slots, room), np.iinfo(np.int32).max, np.int32)
    taken = rng.permutation(slots)[:rows]
    lens = rng.integers(1, room + 1, rows)
    prompts = np.minimum(rng.integers(1, room + 1, rows), lens)
    for slot, n in zip(taken, lens, strict=True):
        table[slot, :n] = rng.integers(0, vocab, n)
        table[slot, n // 2] = vocab - 1
    return {"history": table, "slots": i32(taken), "history_lens": i32(lens), "prompt_lens": i32(prompts)}


def _banned(rng: np.random.Generator, rows: int, vocab: int, past: Arrays) -> Arrays:
    """Single tokens; sequences that the history's end begins; such as differ in one token or are too long."""
    sequences: list[list[int]] = []
    starts, lens = [], []
    for row in range(rows):
        seen = past["history"][past["slots"][row], : past["history_lens"][row]].tolist()
        last = int(rng.integers(vocab))
        mine = [[last], [*seen[-2:], vocab - 1], [*seen, 0], [0, *seen, last]]
        mine.append([*seen[:-1], (seen[-1] + 1) % vocab, last])
        mine = mine if row % 3 == 1 else mine[:1] if row % 3 == 2 else []
        starts.append(len(sequences))
        lens.append(len(mine))
        sequences += mine
    tokens, seq_starts, seq_lens = _flat(sequences, np.int32)
    return {
        "banned_tokens": tokens,
        "banned_seq_starts": seq_starts,
        "banned_seq_lens": seq_lens,
        "banned_starts": i32(starts),
        "banned_lens": i32(lens),
    }


def _adjustments(rng: np.random.Generator, rows: int, vocab: int) -> Arrays:
    """Every third row is left alone; the others take biases, masks, bans and penalties.

    Penalties are no binary fractions, so that a product and a sum fused into one rounding would show.
    """
    past = _history(rng, rows, vocab)
    ids = [rng.permutation(vocab)[: min(vocab, 5)].tolist() if row % 3 else [] for row in range(rows)]
    bias_ids, bias_starts, bias_lens = _flat(ids, np.int32)
    values = np.array([-100, 100, -np.inf, 0.5, -0.0], np.float32)
    masks = rng.integers(0, 2**32, (3, -(-vocab // 32)), dtype=np.uint32)
    masks[0], masks[1] = 0, 2**32 - 1
    masks[0, (vocab - 1) // 32] = 1 << (vocab - 1) % 32  # only the last id
    which = [-1 if row % 3 == 0 else row % 4 - 1 for row in range(rows)]
    options = {
        "repetition_penalty": (1, 1.1, 0.7, 1.3),
        "frequency_penalty": (0, 0.3, -0.7, 1.9),
        "presence_penalty": (0, -0.6, 1.7, 0.1),
    }
    penalties = {
        name: np.array([values[row % 3 and row % 4] for row in range(rows)], np.float32)
        for name, values in options.items()
    }
    return {
        "bias_ids": bias_ids,
        "bias_values": values[np.arange(len(bias_ids)) % len(values)],
        "bias_starts": bias_starts,
        "bias_lens": bias_lens,
        "masks": masks,
        "mask_rows": i32(which),
        **_banned(rng, rows, vocab, past),
        **past,
        **penalties,
    }


def _draw(rng: np.random.Generator, rows: int, vocab: int) -> Arrays:
    """Greedy, cold, hot; cuts that keep one token, all, or more than there are; seeds of all 64 bits."""
    choices = {
        "temperature": (0, 1, 0.7, 1e-3, 1.5, 1e-9, 100),
        "top_p": (1, 0.9, 0.5, 1, 1e-6, 0.999),
        "min_p": (0, 0, 0.1, 1, 0),
    }
    drawn = {
        name: np.array([options[row % len(options)] for row in range(rows)], np.float32)
        for name, options in choices.items()
    }
    ks = (0, 1, 5, vocab, vocab + 7, 40, -1, 2)
    return {
        **drawn,
        "top_k": i32([ks[row % len(ks)] for row in range(rows)]),
        "seeds": rng.integers(0, 2**64, rows, dtype=np.uint64),
        "draws": i32(rng.integers(0, 2**31, rows)),
    }


def _sizes(arrays: Arrays, rows: int, columns: int) -> dict[str, int]:
    sizes = {"L": rows, "V": columns}
    if "masks" in arrays:
        sizes |= {"J": len(arrays["bias_ids"]), "E": len(arrays["masks"]), "I": arrays["masks"].shape[1]}
        sizes |= {"U": len(arrays["banned_tokens"]), "O": len(arrays["banned_seq_lens"])}
    if "history" in arrays:
        sizes |= dict(zip("ZX", arrays["history"].shape, strict=True))
    return sizes


def adjust_logits_cases(rng: np.random.Generator) -> list[Case]:
    cases = []
    for rows, vocab, columns in SHAPES:
        logits = _logits(rng, rows, vocab)
        _spoil(rng, logits)
        arrays = {"logits": _padded(rng, logits, columns), **_adjustments(rng, rows, vocab)}
        cases.append(
            Case(
                f"{rows} rows of {vocab} in {columns}",
                _sizes(arrays, rows, columns),
                {"vocab_size": vocab},
                arrays,
            )
        )
    return cases


def sample_tokens_cases(rng: np.random.Generator) -> list[Case]:
    cases = []
    for rows, vocab, columns in (*SHAPES, WIDE):
        scores = _logits(rng, rows, vocab)
        _spoil(rng, scores)
        arrays = {"scores": _padded(rng, scores, columns), **_draw(rng, rows, vocab)}
        cases.append(
            Case(
                f"{rows} rows of {vocab} in {columns}",
                _sizes(arrays, rows, columns),
                {"vocab_size": vocab},
                arrays,
            )
        )
    return cases


def append_tokens_cases(rng: np.random.Generator) -> list[Case]:
    """Full histories stay as they are."""
    cases = []
    for rows, vocab in dict.fromkeys(shape[:2] for shape in SHAPES):
        arrays = _history(rng, rows, vocab)
        del arrays["prompt_lens"]
        arrays["tokens"] = i32(rng.integers(0, vocab, rows))
        arrays["history_lens"][:1] = arrays["history"].shape[1]
        sizes = {"L": rows} | dict(zip("ZX", arrays["history"].shape, strict=True))
        cases.append(Case(f"{rows} rows of {vocab}", sizes, {}, arrays))
    return cases


def _wanted(rng: np.random.Generator, rows: int, most: int) -> Array:
    return i32([(0, -1, most, 1)[row % 4] for row in range(rows)])


def token_logprobs_cases(rng: np.random.Generator) -> list[Case]:
    """Targets that are best, last, impossible (-inf); ties across the K best; rows nobody asked for."""
    cases = []
    for rows, vocab, columns in SHAPES:
        logits, most = _logits(rng, rows, vocab), min(20, vocab)
        _spoil(rng, logits)
        targets = rng.integers(0, vocab, rows)
        targets[::3] = vocab - 1
        if rows:
            targets[0] = np.argmax(logits[0])
            targets[-1] = columns - 1  # no token's where there is padding
        arrays = {
            "logits": _padded(rng, logits, columns),
            "targets": i32(targets),
            "top_lens": _wanted(rng, rows, most),
        }
        cases.append(
            Case(
                f"{rows} rows of {vocab} in {columns}",
                {"L": rows, "V": columns, "K": most},
                {"vocab_size": vocab},
                arrays,
            )
        )
    return cases


def logprobs_bound(case: Case) -> Arrays:
    """log of a sum of V exponentials in 64 lanes or more, and x - max, each by U of its size."""
    vocab = case.attrs["vocab_size"]
    x = case.arrays["logits"][:, :vocab].astype(np.float64)
    finite = np.where(np.isfinite(x), x, 0)
    spread = finite.max(axis=1, initial=-np.inf) - finite.min(axis=1, initial=np.inf)
    error = np.where(np.isfinite(spread), spread, 0) * 4 * U + (vocab / 64 + 32) * U
    return {"logprobs": error, "top_logprobs": error[:, None]}


def sample_cases(rng: np.random.Generator) -> list[Case]:
    cases = []
    for rows, vocab, columns in (*SHAPES, WIDE):
        logits, most = _logits(rng, rows, vocab), min(20, vocab)
        _spoil(rng, logits)
        arrays = {
            "logits": _padded(rng, logits, columns),
            **_adjustments(rng, rows, vocab),
            **_draw(rng, rows, vocab),
        }
        arrays["top_lens"] = _wanted(rng, rows, most)
        sizes = _sizes(arrays, rows, columns) | {"K": most}
        cases.append(Case(f"{rows} rows of {vocab} in {columns}", sizes, {"vocab_size": vocab}, arrays))
    return cases
