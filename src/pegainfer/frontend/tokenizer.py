"""Text to token ids and back. The `tokenizers` library encodes; decoding is bytes and UTF-8, done here.

Decoding by bytes makes a stream and a whole text equal by construction: `decode` and the incremental
detokenizer read the same table of bytes a token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
import tokenizers

from pegainfer.contract.errors import RequestError, UnsupportedError
from pegainfer.frontend.pieces import MIN_CHARS, PieceCache, PieceCutter
from pegainfer.frontend.spelling import BYTE_OF_CHAR, SPACE_MARK
from pegainfer.frontend.token_bound import TokenBound

# Work is spread by the caller's threads. Left on, the library starts a thread a core at its first batch.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say of its text beside the vocabulary."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a sequence
    special_tokens: Mapping[str, str] = {}  # 'bos_token' -> '<s>', for templates
    chat_template: str | None = None
    named_templates: Mapping[str, str] = msgspec.field(default_factory=dict)  # e.g. 'tool_use', 'rag'


class Tokenizer:
    """A vocabulary with its rules. Safe to share among threads; `encode` frees the GIL.

    Immutable but for `pieces`, which remembers what was encoded: see there. `bound` is made at its first use.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TextConfig) -> None:
        """Takes over `backend`, whose truncation and padding are switched off.

        Raises UnsupportedError where its decoder is neither byte-level nor SentencePiece with byte fallback.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._without_special = _ignoring_special_tokens(backend)
        self.config = config
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.pieces = PieceCache(PieceCutter(list(self._added.values())))
        self._ends = _ends(backend)
        self._byte_level, self._strips_space = _decoder_kind(backend)
        self._bytes: dict[int, bytes] = {}  # filled as ids are met; at most one entry an id

    @property
    def bos_token_id(self) -> int | None:
        return self.config.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        return self.config.chat_template

    @property
    def strips_leading_space(self) -> bool:
        """Whether a whole text loses one leading space (SentencePiece's dummy prefix)."""
        return self._strips_space

    @cached_property
    def bound(self) -> TokenBound:
        """How many tokens a text has at least."""
        return TokenBound(self._backend, byte_level=self._byte_level)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special_tokens: put BOS (and EOS) where the model's files say so.
        parse_special: a special token's literal in the text becomes its id; else it is plain text.
        Raises RequestError where the text is not encodable (a lone surrogate).
        """
        if len(text) >= MIN_CHARS and parse_special and (self._ends is not None or not add_special_tokens):
            before, after = self._ends if add_special_tokens and self._ends is not None else ([], [])
            ids = self.pieces.encode(text, partial(self.encode_batch, add_special_tokens=False))
            return before + ids + after
        (ids,) = self.encode_batch([text], add_special_tokens=add_special_tokens, parse_special=parse_special)
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` for several texts. Raises RequestError for what UTF-8 cannot hold."""
        backend = self._backend if parse_special else self._without_special
        try:
            # The batch call is the one that frees the GIL; "fast" leaves offsets out.
            found = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            raise RequestError("text is not valid Unicode", expected="no lone surrogates") from None
        return [encoding.ids for encoding in found]

    def decode(
        self, ids: Iterable[int], *, skip_special_tokens: bool = True, after_text: bool = False
    ) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, ids without a token nothing.

        after_text: the ids go on after other text, so that a leading space is kept.
        """
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        text = b"".join([self.token_bytes(i) for i in ids if i not in skip]).decode(errors="replace")
        return text[1:] if self._strips_space and not after_text and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token_string(token_id)
            if token is None:
                return b""
            found = self._bytes[token_id] = self._to_bytes(token_id, token)
        return found

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it ('Ġthe', '▁the', '<0x0A>'); None for an id without one."""
        if not 0 <= token_id < 1 << 32:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def special_id(self, token: str) -> int | None:
        """The id of a special token; None for what is none."""
        found = self.token_id(token)
        return found if found in self.special_ids else None

    def special_stops(self, stops: Collection[str]) -> dict[int, str]:
        """The stop strings that are special tokens, by id: the text of an answer may not show them."""
        if not stops:
            return {}
        found = {self.special_id(text): text for text in stops}
        return {token: text for token, text in found.items() if token is not None}

    def _to_bytes(self, token_id: int, token: str) -> bytes:
        if self._byte_level:
            # Added tokens are plain text. (The library reads those with Latin-1 letters as bytes: '<|é|>'.)
            if token_id in self._added or not all(c in BYTE_OF_CHAR for c in token):
                return token.encode()
            return bytes(BYTE_OF_CHAR[c] for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.replace(SPACE_MARK, " ").encode()


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte-level, strips one leading space). Raises UnsupportedError for other decoders."""
    decoder = backend.decoder
    state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {p["type"] for p in parts}
    if kinds == {"ByteLevel"}:
        return True, False
    replaces = [(p["pattern"].get("String"), p["content"]) for p in parts if p["type"] == "Replace"]
    strips = [(p["content"], p["start"], p["stop"]) for p in parts if p["type"] == "Strip"]
    known = kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds
    if known and replaces == [(SPACE_MARK, " ")] and strips in ([], [(" ", 1, 0)]):
        return False, bool(strips)
    raise UnsupportedError(
        "the tokenizer's decoder is not supported",
        expected="ByteLevel, or Replace ▁, ByteFallback, Fuse (and Strip)",
        got=" ".join(p["type"] for p in parts),
    )


def _ends(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that encoding with special tokens puts before and after a text; None where that is not all."""
    probe = "a"
    plain: list[int] = backend.encode(probe, add_special_tokens=False).ids
    whole: list[int] = backend.encode(probe, add_special_tokens=True).ids
    places = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
    if len(places) != 1:
        return None
    return whole[: places[0]], whole[places[0] + len(plain) :]


def _ignoring_special_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer over the same model in memory that reads special tokens in a text as plain text.

    The library's switch for this belongs to the whole tokenizer, which threads share; hence a second one.
    """
    plain = tokenizers.Tokenizer(backend.model)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = backend.pre_tokenizer
    plain.post_processor = backend.post_processor
    plain.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    plain.encode_special_tokens = True
    return plain
