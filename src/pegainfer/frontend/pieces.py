"""Tokenising what was not tokenised before: a chat's earlier turns are found, not encoded again.

A text is cut before each added token that the tokenizer matches as it stands, `<|im_start|>` and its like:

    <s>system …  │  <|im_start|>user\\n Hello  │  <|im_end|>\\n  │  <|im_start|>assistant\\n

The cut is exact. The library splits a text at such tokens before anything else, then normalises, splits and
encodes each part for itself; a piece keeps the token that it begins with, so that what only the first part of
a text undergoes happens to the first piece alone. Tokens that reach out to their left (lstrip, single words)
or are looked for after normalisation are no place to cut. Pieces are kept by their text, the longest unused
are dropped first.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections.abc import Callable, Sequence

import tokenizers

from pegainfer.frontend.recent import Recent

MAX_BYTES = 64 << 20  # of all pieces and their ids in memory
MIN_CHARS = 256  # a shorter text is encoded quicker than it is cut
_OVERHEAD = 300  # bytes: the objects of one entry


class PieceCutter:
    """Where a tokenizer's texts may be cut."""

    def __init__(self, added: Sequence[tokenizers.AddedToken]) -> None:
        raw = [token for token in added if token.content and not token.normalized]
        # The library finds the leftmost match, and of several there the longest.
        contents = sorted((token.content for token in raw), key=lambda text: len(text.encode()), reverse=True)
        self._matches = re.compile("|".join(map(re.escape, contents))) if contents else None
        self._cuts = frozenset(t.content for t in raw if not (t.lstrip or t.single_word))

    def cut(self, text: str) -> list[str]:
        """The pieces, none empty, whose concatenation is `text`."""
        if self._matches is None or not text:
            return [text] if text else []
        starts = [0]
        for match in self._matches.finditer(text):
            if match.group() in self._cuts and match.start():
                starts.append(match.start())
        return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


class PieceCache:
    """Ids of pieces, by text. Safe to share among threads."""

    def __init__(self, cutter: PieceCutter, max_bytes: int = MAX_BYTES) -> None:
        self._cutter = cutter
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pieces: Recent[str, array[int]] = Recent(max_bytes, _size)
        self.chars = 0  # that came in, since the start
        self.known_chars = 0  # of them, those that were not encoded again

    def limit(self, max_bytes: int) -> None:
        """Changes how many bytes of pieces and their ids are kept."""
        with self._lock:
            self._max_bytes = max_bytes
            self._pieces.limit(max_bytes)

    def encode(self, text: str, encode_batch: Callable[[list[str]], list[list[int]]]) -> list[int]:
        """The ids of a text, special tokens parsed and none added.

        Args:
            encode_batch: gives the ids of new pieces.
        """
        pieces = self._cutter.cut(text)
        with self._lock:
            found = [self._pieces.get(piece) for piece in pieces]
        missing = list(dict.fromkeys(p for p, ids in zip(pieces, found, strict=True) if ids is None))
        new = dict(zip(missing, encode_batch(missing) if missing else (), strict=True))
        out: list[int] = []
        for piece, ids in zip(pieces, found, strict=True):
            out += new[piece] if ids is None else ids
        with self._lock:
            self.chars += len(text)
            self.known_chars += len(text) - sum(map(len, missing))
            for piece, fresh in new.items():
                self._keep(piece, array("I", fresh))
        return out

    def _keep(self, piece: str, ids: array[int]) -> None:
        if _size(piece, ids) <= self._max_bytes // 4:
            self._pieces.put(piece, ids)


def _size(piece: str, ids: array[int]) -> int:
    return sys.getsizeof(piece) + ids.itemsize * len(ids) + _OVERHEAD
