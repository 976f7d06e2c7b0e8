"""How many tokens a text has at least, for a hundredth of the price of tokenising it.

Each byte b has a price of 1 / (bytes of the longest token that holds b). The bytes of any token then cost 1
at most, and what a text's bytes cost together is a number of tokens that it cannot do without:

    prices of a text ≤ Σ over its tokens of the prices of what they cover ≤ number of its tokens

That needs every byte of a text to be covered, so prices are 0 where it may not be: bytes without a token,
which BPE drops or joins into one unknown token, and SentencePiece's spaces, which have another spelling in
tokens. A normalizer may change bytes before they are covered. NFC leaves Chinese characters alone, and ASCII
where no other kind follows; of the rest it makes a quarter of the bytes at the least (U+1FBE U+0308 U+0301,
seven bytes, become U+0390, two), none of them ASCII but for three characters. What it may change costs a
quarter of the lowest price of what may come out. Tokenizers with rules of other kinds have no bound.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from pegainfer.frontend.spelling import BYTE_OF_CHAR, SPACE_MARK

CHUNK = 1 << 14  # characters that are counted without a pause for other threads
NFC_SHRINKS = 4  # times, the size in UTF-8 at the most
NFC_MAKES_ASCII = "K`;"  # of U+212A, U+1FEF and U+037E
# What NFC may change: characters beyond ASCII, one before them, and one whose successor is not seen.
NOT_PLAIN = re.compile(r"[\0-\x7f]?(?:[^\0-\x7f\u4e00-\u9fff]+|\Z)")
_KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")  # cuts that drop nothing


class TokenBound:
    """Immutable. A tokenizer of 150,000 tokens takes 0.2 s."""

    def __init__(self, backend: tokenizers.Tokenizer, *, byte_level: bool) -> None:
        """
        Args:
            byte_level: tokens are spelled in GPT-2's alphabet, else as SentencePiece does with byte fallback.
        """
        self._byte_level = byte_level
        self._nfc = False
        self._prices: list[float] | None = None
        self._changed = 0.0  # price of a byte that NFC may change
        if self._keeps_text(backend):
            self._set_prices(list(self._readings(backend)))

    def at_least(self, text: str, enough: int) -> int:
        """A number of tokens that `text` has at least, no special ones added; 0 where there is no bound.

        Args:
            enough: more need not be counted.
        """
        prices = self._prices
        total = 0.0
        if prices is None:
            return 0
        for start in range(0, len(text), CHUNK):
            chunk = text[start : start + CHUNK]
            if not self._byte_level:
                chunk = chunk.replace(SPACE_MARK, "")
            if self._nfc:
                plain = chunk[:-1] if chunk.isascii() else NOT_PLAIN.sub("", chunk)
                total += (_size(chunk) - _size(plain)) * self._changed
                chunk = plain
            counts = Counter(chunk.encode("utf-8", "surrogatepass"))
            total += sum(prices[byte] * count for byte, count in counts.items())
            if total > enough:
                break
        return int(total)

    def _keeps_text(self, backend: tokenizers.Tokenizer) -> bool:
        """Whether all that a text says reaches its tokens, by rules that are known. Notes NFC."""
        model = backend.model
        if not isinstance(model, tokenizers.models.BPE):
            return False
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return False
        if any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values()):
            return False  # these swallow any number of spaces
        normalizers = list(_parts(backend.normalizer, "normalizers"))
        self._nfc = any(n["type"] == "NFC" for n in normalizers)
        if not all(self._known_normalizer(n) for n in normalizers):
            return False
        cuts = list(_parts(backend.pre_tokenizer, "pretokenizers"))
        if not all(self._known_cut(c) for c in cuts):
            return False
        if self._byte_level:
            return any(c["type"] == "ByteLevel" for c in cuts)
        fallback = (backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
        return bool(model.byte_fallback) and all(fallback)

    def _known_normalizer(self, rule: Mapping[str, Any]) -> bool:
        if rule["type"] == "Replace":
            marks = rule["pattern"] == {"String": " "} and rule["content"] == SPACE_MARK
            return marks and not self._byte_level
        return rule["type"] in ("NFC", "Prepend")

    def _known_cut(self, rule: Mapping[str, Any]) -> bool:
        match rule["type"]:
            case "ByteLevel":
                return self._byte_level
            case "Metaspace":
                return not self._byte_level and rule["replacement"] == SPACE_MARK
            case "Split":
                return rule["behavior"] in _KEEPING
            case kind:
                return bool(kind == "Digits")

    def _readings(self, backend: tokenizers.Tokenizer) -> Iterator[bytes]:
        """What each token may cover, SentencePiece's spaces left out."""
        texts = list(backend.get_vocab(with_added_tokens=False))
        if self._byte_level:
            table = {ord(char): chr(byte) for char, byte in BYTE_OF_CHAR.items()}
            alphabet = frozenset(BYTE_OF_CHAR)
            yield from (t.translate(table).encode("latin-1") for t in texts if alphabet.issuperset(t))
            texts = []
        for token in backend.get_added_tokens_decoder().values():
            texts.append(token.content)
            if backend.normalizer is not None:  # in whose text some of them are looked for
                texts.append(backend.normalizer.normalize_str(token.content))
        yield from ((t if self._byte_level else t.replace(SPACE_MARK, "")).encode() for t in texts)

    def _set_prices(self, readings: list[bytes]) -> None:
        readings.sort(key=len, reverse=True)
        prices = [0.0 if self._byte_level else 1.0] * 256  # of bytes that no token is spelled with
        unseen = set(range(256))
        for reading in readings:
            if new := unseen.intersection(reading):
                for byte in new:
                    prices[byte] = 1.0 / len(reading)
                unseen -= new
        if self._nfc:
            beyond = [b for b in range(0x80, 0xF5) if b not in (0xC0, 0xC1)]  # the bytes of UTF-8
            made = min(prices[b] for b in (*beyond, *NFC_MAKES_ASCII.encode()))
            self._changed = min(made / NFC_SHRINKS, *prices[:0x80])
        if not self._byte_level:
            prices[ord(" ")] = 0.0
        self._prices = prices


def _parts(rule: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """The rules of a normalizer or pre-tokenizer one by one, as its state spells them."""
    todo: list[Any] = [] if rule is None else [json.loads(rule.__getstate__())]
    while todo:
        state = todo.pop()
        if state["type"] == "Sequence":
            todo += state[name]
        else:
            yield state


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
