"""Keyword arguments of a Python call, turned into JSON as they are written."""

from __future__ import annotations

import ast
import json
import re

from pegainfer.frontend.tools.call import write_object
from pegainfer.frontend.tools.python_values import escape, literal

MAX_PYTHON_CHARS = 1 << 16  # of what Python's parser is given at once: its stack is not ours
_BETWEEN = re.compile(r"[\s,]*")
_KEYWORD = re.compile(r"(?P<key>[A-Za-z_]\w*)\s*=\s*(?=[^=\s])")
_KEYWORD_BEGUN = re.compile(r"[A-Za-z_]\w*\s*(?:=\s*)?\Z")
_STRING = re.compile(r"""(["'])(?!\1)|(["'])\2(?!\2)(?=.)""", re.DOTALL)  # no beginning of three quotes
_QUOTES_AT_END = re.compile(r"""(["'])\1?\Z""")
_PLAIN = re.compile(r"""[^"'\\]+""")


class PythonStream:
    """State of one call: from the character after its opening parenthesis to the closing one, which is taken.

    Strings in simple quotes are passed on as they come, other values once they are complete. `done`, `broken`
    and `rest` are those of `JsonStream`; a value that is no literal breaks it.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.rest = ""
        self._opened = False  # the brace of the object was passed on
        self._num_fields = 0
        self._key: str | None = None  # of the argument whose value comes
        self._quote = ""  # around the string that is open
        self._scan = _ValueEnd()

    @property
    def whole(self) -> bool:
        return self.done

    def push(self, text: str) -> str:
        """What the text adds to the arguments."""
        self.rest += text
        out = "" if self._opened else "{"
        self._opened = True
        while not (self.done or self.broken):
            before = len(self.rest), self._key
            if self._quote:
                out += self._string()
            else:
                out += self._between() if self._key is None else self._value(self._key)
            if before == (len(self.rest), self._key):
                break
        return out

    def flush(self) -> str:
        """The end of the text; nothing of an incomplete value is passed on."""
        self.rest = ""
        return ""

    def _between(self) -> str:
        found = _BETWEEN.match(self.rest)
        self.rest = self.rest[found.end() if found else 0 :]
        if self.rest.startswith(")"):
            self.rest = self.rest[1:]
            self.done = True
            return "}"
        if keyword := _KEYWORD.match(self.rest):
            self._key, self._scan = keyword["key"], _ValueEnd()
            self.rest = self.rest[keyword.end() :]
        elif self.rest and not _KEYWORD_BEGUN.match(self.rest):
            self.broken = True
        return ""

    def _value(self, key: str) -> str:
        if found := _STRING.match(self.rest):
            self._quote = found[1] or found[2]
            self.rest = self.rest[1:]
            return f'{self._comma()}{json.dumps(key)}: "'
        if _QUOTES_AT_END.match(self.rest):
            return ""
        end = self._scan.find(self.rest)
        if end is None:
            self.broken = len(self.rest) > MAX_PYTHON_CHARS
            return ""
        try:
            value = literal(ast.parse(self.rest[:end].strip(), mode="eval").body)
            text = write_object({key: value})
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            text = None
        if text is None or end > MAX_PYTHON_CHARS:
            self.broken = True
            return ""
        self.rest, self._key = self.rest[end:], None
        return self._comma() + text[1:-1]

    def _string(self) -> str:
        """The next piece of a string."""
        text = self.rest
        if not text:
            return ""
        taken, shown = 1, text[0]
        if plain := _PLAIN.match(text):
            taken, shown = plain.end(), plain[0]
        elif text[0] == "\\":
            found = escape(text)
            self.broken = found is None
            taken, shown = found or (0, "")
        elif text[0] == self._quote:
            following = text[1:].lstrip()
            if not following:
                return ""
            self.broken = following[0] not in ",)"  # two strings side by side, or a sum of them
            if not self.broken:
                self._key, self._quote, self.rest = None, "", text[1:]
            return "" if self.broken else '"'
        self.rest = text[taken:]
        return json.dumps(shown, ensure_ascii=False)[1:-1]

    def _comma(self) -> str:
        self._num_fields += 1
        return ", " if self._num_fields > 1 else ""


class _ValueEnd:
    """Looks for the comma or parenthesis after a value, in a text that grows."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._quote = ""

    def find(self, text: str) -> int | None:
        while self._at < len(text):
            c = text[self._at]
            if self._quote:
                if c == "\\":
                    if self._at + 1 == len(text):
                        return None
                    self._at += 1
                elif text.startswith(self._quote, self._at):
                    self._at += len(self._quote) - 1
                    self._quote = ""
                elif c == self._quote[0] and len(text) - self._at < len(self._quote):
                    return None
            elif c in "\"'":
                if len(text) - self._at < 3:
                    return None
                self._quote = c * 3 if text.startswith(c * 3, self._at) else c
                self._at += len(self._quote) - 1
            elif c in "([{":
                self._depth += 1
            elif c in ",)]}" and not self._depth:
                return self._at
            elif c in ")]}":
                self._depth -= 1
            self._at += 1
        return None
