"""A vocabulary as a grammar sees it, and llguidance's own form of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pegainfer.contract.errors import UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from pegainfer.frontend.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of each token, by id; crosses to the worker processes."""

    tokens: list[bytes]
    special_ids: list[int]  # a grammar never spells these as text
    eos_ids: list[int]  # allowed where the grammar accepts


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """What a grammar library must know of a tokenizer, as plain lists: it goes to another process."""
    return Vocabulary(
        [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
        sorted(tokenizer.special_ids | set(tokenizer.eos_token_ids)),
        list(tokenizer.eos_token_ids),
    )


class _Wrapper:
    """What LLTokenizer reads. It encodes as bytes; grammars are such that no mask asks (compiler.py)."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self._byte_ids = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self._byte_ids[bytes([b])] for b in raw if bytes([b]) in self._byte_ids]


def ll_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Takes about half a second for 50,000 tokens. Raises UnsupportedError for a model without EOS."""
    import llguidance

    if not vocabulary.eos_ids:
        raise UnsupportedError("the model has no end-of-sequence token, which a grammar needs")

    wrapper: Any = _Wrapper(vocabulary)
    slices: Sequence[str] = llguidance.LLTokenizer.json_slices()
    return llguidance.LLTokenizer(wrapper, eos_token=vocabulary.eos_ids, slices=list(slices))
