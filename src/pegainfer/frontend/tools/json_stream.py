"""A JSON object that comes in pieces: passed on as it is written, checked against JSON's grammar.

What is passed on is what the model wrote, with three exceptions: a control character in a string, which JSON
forbids and models write, becomes its escape; half a UTF-16 pair, which no text can hold, becomes U+FFFD; and
a number, a word or an escape is passed on once it is complete.
"""

from __future__ import annotations

import json
import math
import re

MAX_DEPTH = 500  # of nested values: readers of JSON have limits near 1000
MAX_SCALAR = 1000  # characters of a number; Python, for one, reads 4300 digits at most
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_BLANKS = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_WORDS = ("true", "false", "null")
_CLOSES = {"{": "}", "[": "]"}
# What may come next, besides blanks.
_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _COLON, _NEXT = range(6)


class JsonStream:
    """Follows one object, whose opening brace is the first character that is pushed.

    `done`: the object is complete. `broken`: the next character is none that JSON has there. In both cases
    `rest` is what has not been passed on, and further text is not taken.
    """

    def __init__(self, *, within: bool = False) -> None:
        """`within`: the object is a member of another, which is followed to its end and not passed on."""
        self.done = False
        self.broken = False
        self.rest = ""
        self._stack = ["{"] if within else []
        self._shown_depth = len(self._stack)
        self._next = _VALUE
        self._in_string = False
        self._is_key = False
        self._hidden = False  # what follows is of the object around

    @property
    def whole(self) -> bool:
        """Whether the object has come to its end."""
        return self.done or self._hidden

    def push(self, text: str) -> str:
        """What the text adds to the object."""
        self.rest += text
        out: list[str] = []
        while self.rest and not (self.done or self.broken):
            hidden = self._hidden
            taken, shown = self._string() if self._in_string else self._between()
            if not taken:
                break
            self.rest = self.rest[taken:]
            if not hidden:
                out.append(shown)
        if self.broken and self._hidden:  # the object itself is whole
            self.broken, self.done = False, True
        return "".join(out)

    def flush(self) -> str:
        """The end of the text: what there is of an incomplete escape, number or word."""
        text, self.rest = self.rest, ""
        return "" if self.whole else text

    def _string(self) -> tuple[int, str]:
        """How many characters are taken, and what they are passed on as."""
        text = self.rest
        if plain := _PLAIN.match(text):
            return plain.end(), plain[0]
        if text[0] == '"':
            self._in_string = False
            self._next = _COLON if self._is_key else _NEXT
            return 1, '"'
        if text[0] != "\\":
            return 1, json.dumps(text[0])[1:-1]
        if len(text) < 2:
            return 0, ""
        if text[1] != "u":
            return (2, text[:2]) if text[1] in '"\\/bfnrt' else self._break()
        return self._unicode(text)

    def _unicode(self, text: str) -> tuple[int, str]:
        found = _UNICODE.match(text)
        if found is None:
            return (0, "") if re.fullmatch(r"\\u[0-9a-fA-F]{0,3}", text) else self._break()
        code = int(text[2:6], 16)
        if 0xDC00 <= code < 0xE000:
            return 6, "\\ufffd"
        if not 0xD800 <= code < 0xDC00:
            return 6, found[0]
        other = _UNICODE.match(text, 6)
        if other is not None:
            pair = 0xDC00 <= int(text[8:12], 16) < 0xE000
            return (12, text[:12]) if pair else (6, "\\ufffd")
        return (0, "") if re.fullmatch(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?", text[6:]) else (6, "\\ufffd")

    def _between(self) -> tuple[int, str]:
        """The same for what stands outside of strings."""
        text, expected = self.rest, self._next
        if blanks := _BLANKS.match(text):
            return blanks.end(), blanks[0]
        c = text[0]
        if c == '"' and expected in (_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY):
            self._in_string, self._is_key = True, expected in (_KEY, _FIRST_KEY)
        elif c in "{[" and expected in (_VALUE, _FIRST_VALUE) and len(self._stack) < MAX_DEPTH:
            self._stack.append(c)
            self._next = _FIRST_KEY if c == "{" else _FIRST_VALUE
        elif c in "}]" and self._may_close(c):
            self._close()
        elif c == ":" and expected == _COLON:
            self._next = _VALUE
        elif c == "," and expected == _NEXT:
            self._next = _KEY if self._stack[-1] == "{" else _VALUE
        elif expected in (_VALUE, _FIRST_VALUE):
            return self._scalar(text)
        else:
            return self._break()
        return 1, c

    def _may_close(self, c: str) -> bool:
        empty = _FIRST_KEY if c == "}" else _FIRST_VALUE
        return _CLOSES[self._stack[-1]] == c and self._next in (_NEXT, empty)

    def _close(self) -> None:
        self._stack.pop()
        self._next = _NEXT
        self._hidden = len(self._stack) <= self._shown_depth
        self.done = not self._stack

    def _scalar(self, text: str) -> tuple[int, str]:
        found = _SCALAR.match(text)
        if found is None or found.end() > MAX_SCALAR:
            return self._break()
        if found.end() == len(text):  # more of it may come
            return 0, ""
        word = found[0]
        if word not in _WORDS and not (_NUMBER.fullmatch(word) and math.isfinite(float(word))):
            return self._break()
        self._next = _NEXT
        return len(word), word

    def _break(self) -> tuple[int, str]:
        self.broken = True
        return 0, ""
