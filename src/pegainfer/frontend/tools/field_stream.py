"""Arguments between tags, one by one, turned into JSON as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec

from pegainfer.frontend.json_object import JsonObject
from pegainfer.frontend.tools.call import Tool
from pegainfer.frontend.tools.values import member


class Field(msgspec.Struct, frozen=True):
    """An opening tag that was read. text: the value is a string, written as it is."""

    key: str
    text: bool


class Tags(msgspec.Struct, frozen=True):
    """A family's tags.

    Args:
        opening: an opening tag as a pattern.
        opened: what a tag that matched says.
        closing: what ends a value.
        end: what ends the call.
        line_breaks: one line break before and one after a value are the format's, not the value's.
        by_schema: a value that is not written as text is typed by the tool's schema; else it is JSON.
    """

    opening: re.Pattern[str]
    opened: Callable[[re.Match[str], Tool], Field]
    closing: str
    end: str
    line_breaks: bool
    by_schema: bool


class FieldStream:
    """State of one call: from the end of its head to `tags.end`, which is taken.

    Strings are passed on as they come, other values once they are complete. Text between the values, such as
    a surplus closing tag, is dropped. `done`, `broken` and `rest` are as in `JsonStream`; no text breaks it.
    """

    broken = False

    def __init__(self, tags: Tags, tool: Tool) -> None:
        self.done = False
        self.rest = ""
        self._tags = tags
        self._tool = tool
        self._field: Field | None = None
        self._fresh = False  # nothing of the value was taken
        self._searched = 0  # how far a closing tag was looked for
        self._num_fields = 0
        self._opened = False  # the brace of the object was passed on

    @property
    def whole(self) -> bool:
        return self.done

    def push(self, text: str) -> str:
        """What the text adds to the arguments."""
        self.rest += text
        out = "" if self._opened else "{"
        self._opened = True
        while not self.done:
            before = len(self.rest), self._field
            out += self._between() if self._field is None else self._value(self._field)
            if before == (len(self.rest), self._field):
                break
        return out

    def flush(self) -> str:
        """The end of the text. An incomplete value is passed on as far as it is a string."""
        text, self.rest = self.rest, ""
        return _escaped(text) if self._field is not None and self._field.text else ""

    def _between(self) -> str:
        """Up to the next opening tag or the call's end."""
        text, tags = self.rest, self._tags
        found = tags.opening.search(text)
        at = text.find(tags.end)
        if found is not None and (at < 0 or found.start() < at):
            self.rest = text[found.end() :]
            self._field, self._fresh, self._searched = tags.opened(found, self._tool), True, 0
            if not self._field.text:
                return ""
            return f'{self._comma()}{json.dumps(self._field.key, ensure_ascii=False)}: "'
        if at >= 0:
            self.rest = text[at + len(tags.end) :]
            self.done = True
            return "}"
        self.rest = text[text.rfind("<") :] if "<" in text else ""
        return ""

    def _comma(self) -> str:
        self._num_fields += 1
        return ", " if self._num_fields > 1 else ""

    def _value(self, field: Field) -> str:
        tags = self._tags
        if self._fresh and tags.line_breaks:
            if not self.rest:
                return ""
            self.rest = self.rest.removeprefix("\n")
        self._fresh = False
        at = self.rest.find(tags.closing, self._searched)
        if at < 0:
            if not field.text:
                self._searched = max(0, len(self.rest) - len(tags.closing) + 1)
                return ""
            kept = len(self.rest) - self._held()
            text, self.rest = self.rest[:kept], self.rest[kept:]
            return _escaped(text)
        value = self.rest[:at]
        if tags.line_breaks:
            value = value.removesuffix("\n")
        self.rest = self.rest[at + len(tags.closing) :]
        self._field = None
        if field.text:
            return _escaped(value) + '"'
        return self._comma() + member(field.key, value, self._schema(field))

    def _schema(self, field: Field) -> JsonObject:
        return self._tool.property_schema(field.key) if self._tags.by_schema else {}

    def _held(self) -> int:
        """How much of the text's end may belong to what ends the value."""
        closing = self._tags.closing
        ends = ("\n" + closing, closing) if self._tags.line_breaks else (closing,)
        for size in range(min(len(self.rest), len(ends[0])), 0, -1):
            if any(end.startswith(self.rest[-size:]) for end in ends):
                return size
        return 0


def _escaped(text: str) -> str:
    """As it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
