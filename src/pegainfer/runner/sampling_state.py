"""Sampling parameters of every slot, and those of a step's rows as inputs of the sampling op.

Names of staged arrays are those of the op `sample` (ops/sample.py), which documents each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pegainfer.contract.request import NUMBERS, SamplingParams
from pegainfer.contract.step import NewSlot
from pegainfer.ops.sample import SAMPLE

Array = np.ndarray[Any, Any]

# Operands of the sampling op that are a parameter of the request under the same name, top_k aside.
FLOATS = tuple(o.name for o in SAMPLE.operands if o.name in NUMBERS and o.dtypes == ("f32",))
NO_LOGPROBS = -1
POOL_NONE, POOL_MEAN, POOL_LAST = range(3)
_POOLING = {None: POOL_NONE, "mean": POOL_MEAN, "last": POOL_LAST}
_NO_INTS = np.zeros(0, np.int32)


class _Sequences(msgspec.Struct, frozen=True):
    """Token sequences, end to end. tokens: [U] int32; lens: [O] int32, of each."""

    tokens: Array
    lens: Array

    @staticmethod
    def of(sequences: Sequence[tuple[int, ...]]) -> _Sequences:
        tokens = [token for sequence in sequences for token in sequence]
        return _Sequences(np.array(tokens, np.int32), np.array([len(s) for s in sequences], np.int32))


class _Extras(msgspec.Struct, frozen=True):
    """Parameters that few requests have: lists of any length."""

    bias_ids: Array  # int32, distinct
    bias_values: Array  # float32
    bad_words: _Sequences
    ends: _Sequences  # banned, one token each, until min_tokens are generated
    min_tokens: int
    mask: Array | None  # uint32 [ceil(V / 32)]: allowed_token_ids


class SamplingState:
    """Struct of arrays over slots. Mutated by `enter` and `leave`."""

    def __init__(self, max_slots: int, vocab_size: int, max_logprobs: int) -> None:
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        self.floats = np.zeros((len(FLOATS), max_slots), np.float32)
        self.top_k = np.zeros(max_slots, np.int32)
        self.seeds = np.zeros(max_slots, np.uint64)
        self.logprobs = np.full(max_slots, NO_LOGPROBS, np.int32)
        self.prompt_logprobs = np.full(max_slots, NO_LOGPROBS, np.int32)
        self.pooling = np.zeros(max_slots, np.int8)
        self.changes = 0  # of any slot's parameters so far
        self.scored: set[int] = set()  # slots whose prompt's log-probabilities are asked for
        self.pooled: set[int] = set()  # slots whose prompt's vector is asked for
        self._extras: dict[int, _Extras] = {}
        self._masked: tuple[int, ...] = ()  # rows, and those with a mask, of `_mask_rows`
        self._mask_rows = np.zeros(0, np.int32)
        self._no_mask = np.zeros((0, -(-vocab_size // 32)), np.uint32)
        self._no_lists = self._lists([], _NO_INTS, {})  # of as many rows as were staged last without any

    def enter(self, new: NewSlot) -> None:
        self.changes += 1
        s = new.sampling
        self.floats[:, new.slot] = [getattr(s, name) for name in FLOATS]
        self.top_k[new.slot] = min(s.top_k, self.vocab_size)
        self.seeds[new.slot] = new.seed & (2**64 - 1)
        self.logprobs[new.slot] = self._count(s.logprobs)
        self.prompt_logprobs[new.slot] = self._count(s.prompt_logprobs)
        self.pooling[new.slot] = _POOLING[s.pooling]
        if s.prompt_logprobs is not None:
            self.scored.add(new.slot)
        if s.pooling is not None:
            self.pooled.add(new.slot)
        extras = self._extras_of(s, new.mask_tokens)
        if extras is None:
            self._extras.pop(new.slot, None)
        else:
            self._extras[new.slot] = extras

    def leave(self, slot: int) -> None:
        self.changes += 1
        self.pooling[slot] = POOL_NONE
        self.scored.discard(slot)
        self.pooled.discard(slot)
        self._extras.pop(slot, None)

    @property
    def plain(self) -> bool:
        """Whether no slot has biases, a mask of its own or banned tokens."""
        return not self._extras

    def stage(self, slots: Array, draws: Array, masks: Mapping[int, bytes]) -> dict[str, Array]:
        """Inputs of the sampling op for rows of these slots, but for history and logits.

        Args:
            slots: [L] int32, distinct.
            draws: [L] int32, tokens that each has generated so far.
            masks: bitmask of allowed tokens by place in `slots`.
        """
        floats = self.floats[:, slots]
        inputs: dict[str, Array] = dict(zip(FLOATS, floats, strict=True))
        inputs["top_k"] = self.top_k[slots]
        inputs["seeds"] = self.seeds[slots]
        inputs["top_lens"] = self.logprobs[slots]
        inputs["draws"] = draws
        if masks or self._extras:
            return inputs | self._lists([self._extras.get(slot) for slot in slots.tolist()], draws, masks)
        if len(self._no_lists["bias_lens"]) != len(slots):
            self._no_lists = self._lists([None] * len(slots), draws, {})
        return inputs | self._no_lists

    def _lists(
        self, extras: list[_Extras | None], draws: Array, masks: Mapping[int, bytes]
    ) -> dict[str, Array]:
        return self._stage_bias(extras) | _stage_banned(extras, draws) | self._stage_masks(extras, masks)

    def stage_masks(self, count: int, masks: Mapping[int, bytes]) -> dict[str, Array]:
        """The masks of `count` rows, of which those in `masks` have one; see `stage`.

        For the same rows as in the call before, `mask_rows` is the same array.
        """
        whose = (count, *masks)
        if whose != self._masked:
            self._masked = whose
            self._mask_rows = np.full(count, -1, np.int32)
            self._mask_rows[list(masks)] = np.arange(len(masks))
        if not masks:
            return {"masks": self._no_mask, "mask_rows": self._mask_rows}
        words = np.frombuffer(b"".join(masks.values()), np.uint32)
        return {"masks": words.reshape(len(masks), -1), "mask_rows": self._mask_rows}

    def _count(self, wanted: int | None) -> int:
        return NO_LOGPROBS if wanted is None else min(wanted, self.max_logprobs)

    def _extras_of(self, s: SamplingParams, ends: tuple[int, ...]) -> _Extras | None:
        """None where the request has none. Ids outside the vocabulary are dropped: they name no logit."""
        if not (s.logit_bias or s.bad_words or s.allowed_token_ids is not None or (s.min_tokens and ends)):
            return None
        bias = {i: v for i, v in s.logit_bias if 0 <= i < self.vocab_size}
        mask = None
        if s.allowed_token_ids is not None:
            allowed = np.zeros(self._no_mask.shape[1] * 32, np.uint8)
            allowed[[i for i in s.allowed_token_ids if 0 <= i < self.vocab_size]] = 1
            mask = np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)
        return _Extras(
            bias_ids=np.array(list(bias), np.int32),
            bias_values=np.array(list(bias.values()), np.float32),
            bad_words=_Sequences.of(
                [w for w in s.bad_words if w and all(0 <= i < self.vocab_size for i in w)]
            ),
            ends=_Sequences.of([(i,) for i in ends if 0 <= i < self.vocab_size]),
            min_tokens=s.min_tokens,
            mask=mask,
        )

    def _stage_bias(self, extras: list[_Extras | None]) -> dict[str, Array]:
        lens = np.array([len(e.bias_ids) if e else 0 for e in extras], np.int32)
        present = [e for e in extras if e]
        return {
            "bias_ids": np.concatenate([_NO_INTS, *(e.bias_ids for e in present)]),
            "bias_values": np.concatenate([_NO_INTS.view(np.float32), *(e.bias_values for e in present)]),
            "bias_starts": _starts(lens),
            "bias_lens": lens,
        }

    def _stage_masks(self, extras: list[_Extras | None], masks: Mapping[int, bytes]) -> dict[str, Array]:
        """A row's grammar mask and its allowed_token_ids must both hold."""
        both = dict(masks)
        for row, e in enumerate(extras):
            if e is not None and e.mask is not None:
                given = masks.get(row)
                both[row] = (e.mask if given is None else e.mask & np.frombuffer(given, "<u4")).tobytes()
        return self.stage_masks(len(extras), both)


def _stage_banned(extras: list[_Extras | None], draws: Array) -> dict[str, Array]:
    parts: list[_Sequences] = []
    lens = np.zeros(len(extras), np.int32)
    for row, e in enumerate(extras):
        if e is not None:
            banned = [e.bad_words, e.ends] if draws[row] < e.min_tokens else [e.bad_words]
            parts += banned
            lens[row] = sum(len(part.lens) for part in banned)
    seq_lens = np.concatenate([_NO_INTS, *(part.lens for part in parts)])
    return {
        "banned_tokens": np.concatenate([_NO_INTS, *(part.tokens for part in parts)]),
        "banned_seq_starts": _starts(seq_lens),
        "banned_seq_lens": seq_lens,
        "banned_starts": _starts(lens),
        "banned_lens": lens,
    }


def _starts(lens: Array) -> Array:
    """Where each part begins when parts of these lengths lie end to end: [n] int32."""
    starts: Array = np.cumsum(lens, dtype=np.int32) - lens
    return starts
