"""From logits to tokens: adjusted scores, the draw, its log-probabilities, and the token's place in history.

Order of application, as contract.SamplingParams says: logit bias, allowed and banned tokens (min_tokens bans
EOS and stop ids), penalties, temperature, top_k, top_p, min_p. Rows are independent of each other.

Tokens of a sequence are resident: history[slot] holds prompt and output, `history_lens` counts them. A row's
share of a flat list is starts[l] .. starts[l] + lens[l].

A head may have more rows than there are tokens. Ids from `vocab_size` (an attribute) on name no token: their
logits are never read, no mask or bias makes them possible, and probabilities are those of the ids below.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.sampling import (
    adjust_logits_cases,
    append_tokens_cases,
    logprobs_bound,
    sample_cases,
    sample_tokens_cases,
    token_logprobs_cases,
)
from pegainfer.ops.draw import GREEDY_BELOW, draw_id, kept_ids, random_fraction, weights_of
from pegainfer.ops.fill import logits
from pegainfer.ops.program import Builder
from pegainfer.ops.sample_operands import ADJUST, DRAW, F32, LOGPROBS, TOKENS
from pegainfer.ops.spec import INTS, In, Operand, OpSpec, Out, State, Tolerance, declare
from pegainfer.ops.tensor import Tensor

Array = np.ndarray[Any, Any]

STATUS_OK = 0
STATUS_NOT_FINITE = 1  # a score is NaN or +inf: the model, or a bias, went wrong
STATUS_NOTHING_LEFT = 2  # every score is -inf: masks and bans exclude each other


def _banned_ids(tokens: Array, starts: Array, lens: Array, history: Array) -> list[int]:
    """Last tokens of the sequences whose other tokens are the end of `history`."""
    sequences = [tokens[s : s + n] for s, n in zip(starts, lens, strict=True)]
    return [
        int(seq[-1])
        for seq in sequences
        if len(seq) <= len(history) + 1 and np.array_equal(seq[:-1], history[len(history) - len(seq) + 1 :])
    ]


def _penalise(scores: Array, seen: Array, prompt_len: int, parts: tuple[Any, Any, Any]) -> None:
    """In place, float32, nothing contracted: repetition, then frequency, then presence."""
    repetition, frequency, presence = parts
    ids = np.unique(seen)
    scores[ids] = np.where(scores[ids] > 0, scores[ids] / repetition, scores[ids] * repetition)
    ids, counts = np.unique(seen[prompt_len:], return_counts=True)
    scores[ids] -= frequency * counts.astype(np.float32)
    scores[ids] -= presence


@np.errstate(invalid="ignore", over="ignore")  # what overflows, or becomes NaN, is the draw's to report
def _adjust_logits(
    scores: Array,
    logits: Array,
    bias_ids: Array,
    bias_values: Array,
    bias_starts: Array,
    bias_lens: Array,
    masks: Array,
    mask_rows: Array,
    banned_tokens: Array,
    banned_seq_starts: Array,
    banned_seq_lens: Array,
    banned_starts: Array,
    banned_lens: Array,
    history: Array,
    slots: Array,
    history_lens: Array,
    prompt_lens: Array,
    repetition_penalty: Array,
    frequency_penalty: Array,
    presence_penalty: Array,
    *,
    vocab_size: int,
) -> None:
    vocab = logits.shape[1]
    for row in range(len(logits)):
        s = logits[row].astype(np.float32)
        seen = history[slots[row], : history_lens[row]]
        part = slice(bias_starts[row], bias_starts[row] + bias_lens[row])
        s[bias_ids[part]] += bias_values[part]
        drop = np.zeros(vocab, bool)
        if mask_rows[row] >= 0:
            bits = np.unpackbits(masks[mask_rows[row]].astype("<u4").view(np.uint8), bitorder="little")
            drop[:vocab_size] |= bits[:vocab_size] == 0
        part = slice(banned_starts[row], banned_starts[row] + banned_lens[row])
        drop[_banned_ids(banned_tokens, banned_seq_starts[part], banned_seq_lens[part], seen)] = True
        s[drop & (s < np.inf)] = -np.inf  # NaN and +inf stay, for the draw to report
        penalties = repetition_penalty[row], frequency_penalty[row], presence_penalty[row]
        _penalise(s, seen, prompt_lens[row], penalties)
        s[vocab_size:] = -np.inf
        scores[row] = s


def _sample_tokens(
    tokens: Array,
    status: Array,
    scores: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seeds: Array,
    draws: Array,
    *,
    vocab_size: int,
) -> None:
    for row, s in enumerate(scores[:, :vocab_size]):
        tokens[row], status[row] = 0, STATUS_OK
        if np.isnan(s).any() or s.max() == np.inf:
            status[row] = STATUS_NOT_FINITE
        elif s.max() == -np.inf:
            status[row] = STATUS_NOTHING_LEFT
        elif temperature[row] < GREEDY_BELOW:
            tokens[row] = np.argmax(s)
        else:
            weights = weights_of(s, temperature[row])
            kept = kept_ids(s, weights, int(top_k[row]), top_p[row], min_p[row])
            tokens[row] = draw_id(weights, kept, random_fraction(int(seeds[row]), int(draws[row])))


def _append_tokens(history: Array, tokens: Array, slots: Array, history_lens: Array) -> None:
    fits = history_lens < history.shape[1]
    history[slots[fits], history_lens[fits]] = tokens[fits]


def _token_logprobs(
    logprobs: Array,
    ranks: Array,
    top_ids: Array,
    top_logprobs: Array,
    logits: Array,
    targets: Array,
    top_lens: Array,
    *,
    vocab_size: int,
) -> None:
    logprobs[...], ranks[...], top_ids[...], top_logprobs[...] = 0, 0, -1, 0
    for row in np.flatnonzero(top_lens >= 0):
        x = logits[row, :vocab_size].astype(np.float64)
        if np.isnan(x).any() or not np.isfinite(x.max()) or targets[row] >= vocab_size:
            logprobs[row] = np.nan
            continue
        logp = x - x.max() - np.log(np.sum(np.exp(x - x.max())))
        order = np.argsort(-x, kind="stable")
        best = order[: top_lens[row]]
        logprobs[row] = logp[targets[row]]
        ranks[row] = 1 + np.flatnonzero(order == targets[row])[0]
        top_ids[row, : len(best)], top_logprobs[row, : len(best)] = best, logp[best]


_MASK_WORDS = ("I ≤ ceil(V / 32)", lambda s: s["I"] <= -(-s["V"] // 32))  # ceil(vocab_size / 32)
_K_BEST = ("K ≤ V", lambda s: s["K"] <= s["V"])

_LOGSUM = "logarithm of a float32 sum of V exponentials in 64 lanes or more; tokens and ranks are exact"

ADJUST_LOGITS = declare(
    OpSpec(
        name="adjust_logits",
        doc="scores = logits + bias, -inf where masked or banned, less penalties (float32, uncontracted)",
        operands=(Out("scores", "L V", F32), In("logits", "L V", F32, fill=logits), *ADJUST),
        attrs=("vocab_size",),
        reference=_adjust_logits,
        flops=lambda s: s["L"] * s["V"],
        bytes=lambda s, held: (
            held["scores"] + held["logits"] + held["history"] // s["Z"] * s["L"] + s["L"] * s["I"] * 4
        ),
        requires=(_MASK_WORDS,),
        idle="ZX",
        settings={
            "none": {},
            "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.1},
        },
        cases=adjust_logits_cases,
        tolerance={"f32": Tolerance(0.0, 0.0, "each operation is one float32 rounding in a stated order")},
    )
)

SAMPLE_TOKENS = declare(
    OpSpec(
        name="sample_tokens",
        doc="a token of softmax(scores / temperature) cut by top_k, top_p, min_p (ops/draw.py); or the best",
        operands=(*TOKENS, In("scores", "L V", F32, fill=logits), *DRAW),
        attrs=("vocab_size",),
        reference=_sample_tokens,
        flops=lambda s: 16 * s["L"] * s["V"],
        settings={
            "greedy": {"temperature": 0.0},
            "temperature 0.8": {"temperature": 0.8},
            "top_k 40": {"temperature": 0.8, "top_k": 40},
            "top_k 40, top_p 0.9": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
            "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
            "min_p 0.1": {"temperature": 0.8, "min_p": 0.1},
        },
        cases=sample_tokens_cases,
        tolerance={"f32": Tolerance(0.0, 0.0, "drawn in whole numbers: every backend gives the same token")},
    )
)

APPEND_TOKENS = declare(
    OpSpec(
        name="append_tokens",
        doc="history[slots[l], history_lens[l]] = tokens[l], where the history has room",
        operands=(
            State("history", "Z X", INTS, into="V"),
            In("tokens", "L", INTS, into="V"),
            In("slots", "L", INTS, into="Z"),
            In("history_lens", "L", INTS),
        ),
        reference=_append_tokens,
        bytes=lambda s, held: 4 * held["tokens"],
        idle="ZX",
        cases=append_tokens_cases,
        tolerance={"f32": Tolerance(0.0, 0.0, "a copy")},
    )
)

TOKEN_LOGPROBS = declare(
    OpSpec(
        name="token_logprobs",
        doc="log_softmax(logits) of targets (drawn or prompt tokens) and of the top_lens[l] best ids",
        operands=(
            *LOGPROBS,
            In("logits", "L V", F32, fill=logits),
            In("targets", "L", INTS, into="V"),
            # -1: the row is skipped (0, rank 0, ids -1); 0 … K: so many best
            In("top_lens", "L", INTS, neutral=-1),
        ),
        attrs=("vocab_size",),
        reference=_token_logprobs,
        flops=lambda s: 4 * s["L"] * s["V"],
        requires=(_K_BEST,),
        settings={"top 5": {"top_lens": 5}},
        cases=token_logprobs_cases,
        tolerance={"f32": Tolerance(2.0**-23, 0.0, _LOGSUM, logprobs_bound)},
    )
)


def _sample(b: Builder, *, vocab_size: int, **t: Tensor) -> None:
    ids = {"vocab_size": vocab_size}
    scores = b.buffer("scores", *t["logits"].shape)
    b.emit(ADJUST_LOGITS, ids, scores=scores, logits=t["logits"], **_pick(t, ADJUST))
    b.emit(SAMPLE_TOKENS, ids, scores=scores, **_pick(t, TOKENS + DRAW))
    b.emit(
        TOKEN_LOGPROBS,
        ids,
        logits=t["logits"],
        targets=t["tokens"],
        top_lens=t["top_lens"],
        **_pick(t, LOGPROBS),
    )
    b.emit(APPEND_TOKENS, None, **{k: t[k] for k in ("history", "tokens", "slots", "history_lens")})


def _pick(tensors: dict[str, Tensor], operands: tuple[Operand, ...]) -> dict[str, Tensor]:
    return {o.name: tensors[o.name] for o in operands}


SAMPLE = declare(
    OpSpec(
        name="sample",
        doc="the next token of each row, appended to its history, and its log-probability by the raw logits",
        operands=(
            *TOKENS,
            *LOGPROBS,
            In("logits", "L V", F32, fill=logits),
            *ADJUST,
            *DRAW,
            In("top_lens", "L", INTS, neutral=-1),
        ),
        attrs=("vocab_size",),
        lower=_sample,
        flops=lambda s: 21 * s["L"] * s["V"],
        bytes=lambda s, held: held["logits"] + held["history"] // s["Z"] * s["L"] + s["L"] * s["I"] * 4,
        requires=(_MASK_WORDS, _K_BEST),
        idle="ZX",
        cases=sample_cases,
        tolerance={"f32": Tolerance(2.0**-23, 0.0, _LOGSUM, logprobs_bound)},
    )
)
