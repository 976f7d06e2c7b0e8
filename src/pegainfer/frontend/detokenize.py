"""Token ids to text piece by piece, and the search for stop strings in it. One of each a continuation."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024


class Detokenizer:
    """The text of tokens that come one at a time; O(1) a token.

    The pieces joined are what `Tokenizer.decode` gives for all ids, but for half a character at the end. A
    character comes out with the token that completes it, and what came out is never taken back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        after_text: bool = True,
    ) -> None:
        """
        Args:
            shown_ids: special tokens that are not skipped.
            after_text: the tokens go on after a prompt's, so that a leading space is kept.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        self._strip_space = tokenizer.strips_leading_space and not after_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this token completes; empty for a skipped one or half a character."""
        if token in self._skipped:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token))
        if self._strip_space and text:
            self._strip_space = False
            return text[1:] if text[0] == " " else text
        return text

    def flush(self, *, replace_incomplete: bool = False) -> str:
        """Ends the text. Half a character at its end is dropped, or becomes U+FFFD as in `decode`."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest if replace_incomplete else ""


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, wherever the pieces are cut.

    Each stop string is matched by the Knuth-Morris-Pratt automaton, so the text is read once. What may be the
    beginning of a stop string is held back: the longest end of the text that any of them begins with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises RequestError for too many, empty or too long stop strings."""
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(
                "too many stop strings", param="stop", expected=f"≤ {MAX_STOP_STRINGS}", got=len(stops)
            )
        for stop in stops:
            size = len(stop.encode("utf-8", "surrogatepass"))
            if not 1 <= size <= MAX_STOP_BYTES:
                raise RequestError(
                    "a stop string has a wrong length",
                    param="stop",
                    expected=f"1 to {MAX_STOP_BYTES} bytes",
                    got=size,
                )
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in stops]
        self._first = {stop[0] for stop in stops}
        self._matched = [0] * len(stops)  # how much of each stop string the text's end spells
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string if one is complete.

        The match that ends first counts, and of several that end together the longest. After a match the
        text is over: call `push` no more.
        """
        if not self._held and self._first.isdisjoint(text):
            return text, None
        for at, char in enumerate(text):
            stop = self._advance(char)
            if stop is not None:
                shown = self._held + text[: at + 1]
                self._held = ""
                return shown[: len(shown) - len(stop)], stop
        whole = self._held + text
        safe = len(whole) - max(self._matched, default=0)
        self._held = whole[safe:]
        return whole[:safe], None

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Moves every automaton by one character; the longest stop string that it completes."""
        complete: str | None = None
        for i, stop in enumerate(self._stops):
            borders, n = self._borders[i], self._matched[i]
            while n and stop[n] != char:
                n = borders[n - 1]
            if stop[n] == char:
                n += 1
            self._matched[i] = n
            if n == len(stop) and (complete is None or n > len(complete)):
                complete = stop
        return complete


@lru_cache(maxsize=64)
def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for char in stop[1:]:
        n = borders[-1]
        while n and stop[n] != char:
            n = borders[n - 1]
        borders.append(n + 1 if stop[n] == char else 0)
    return tuple(borders)
