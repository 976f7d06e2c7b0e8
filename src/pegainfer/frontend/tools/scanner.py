"""Finds tool calls in a text that comes in pieces; where it is cut makes no difference to what is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from pegainfer.frontend.tools.call import Tool, ToolCall

Piece = str | ToolCall
# A section whose end marker may stand within a string is read so often at most, then taken for text.
MAX_READS = 64


class Syntax(Protocol):
    """How a model family writes calls: sections of text between a start marker and an end marker."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Markers that open a section; none of them begins with another."""

    @property
    def end(self) -> str | None:
        """What closes a section; None: the end of the text does."""

    @property
    def skips(self) -> tuple[str, ...]:
        """Markers around sections, which are neither calls nor content."""

    @property
    def leading(self) -> bool:
        """Sections are only looked for at the beginning of the text."""

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        """The calls of a whole section; None for what is no call."""

    def unfinished(self, body: str) -> bool:
        """Whether an end marker after `body` stands within a string of the section."""

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """What can be told of a section that was cut off."""


class ToolScanner:
    """One a continuation. Content comes out as soon as it cannot be part of a call; calls come out whole.

    Blanks around calls are dropped.
    """

    def __init__(self, syntax: Syntax, tools: Sequence[Tool]) -> None:
        self._syntax = syntax
        self._tools = tools
        self._markers = syntax.starts + syntax.skips
        self._text = ""  # not decided yet: in a section all of its body
        self._start: str | None = None  # the marker of the section that is open
        self._searched = 0  # how far an end marker was looked for in the body
        self._reads = 0
        self._blanks = ""  # at the end of the content, dropped if a call follows
        self._content = False  # whether content was shown
        self._calls = 0

    def push(self, text: str) -> list[Piece]:
        """What the text completes, in order."""
        self._text += text
        out: list[Piece] = []
        while self._in_section(out) if self._start is not None else self._outside(out):
            pass
        return _joined(out)

    def flush(self, *, truncated: bool) -> list[Piece]:
        """The end of the text. `truncated`: a limit ended it, not the model."""
        out: list[Piece] = []
        text, start = self._text, self._start
        self._text, self._start = "", None
        if start is None:
            self._show(text, out)
        else:
            calls = self._syntax.read(start, text, self._tools)
            if calls is None and truncated:
                calls = self._syntax.rest(start, text, self._tools)
                calls[-1:] = [replace(call, whole=False) for call in calls[-1:]]
            self._take(calls or None, start + text, out)
        if self._blanks and not self._calls:
            out.append(self._blanks)
        self._blanks = ""
        return _joined(out)

    def _outside(self, out: list[Piece]) -> bool:
        """Shows what is content, up to a marker; False if there is none (yet)."""
        if self._syntax.leading and not self._calls:
            body = self._text.lstrip()
            undecided = not body or any(m.startswith(body) and m != body for m in self._markers)
            if not self._content and undecided:
                return False
            if self._content or not body.startswith(self._markers):
                self._show(self._text, out)
                self._text = ""
                return False
        found = [(at, m) for m in self._markers if (at := self._text.find(m)) >= 0]
        if not found:
            held = _held(self._text, self._markers)
            self._show(self._text[: len(self._text) - held], out)
            self._text = self._text[len(self._text) - held :]
            return False
        at, marker = min(found)
        self._show(self._text[:at], out)
        self._text = self._text[at + len(marker) :]
        if marker in self._syntax.starts:
            self._start, self._searched, self._reads = marker, 0, 0
        return True

    def _in_section(self, out: list[Piece]) -> bool:
        """Reads the section once its end marker is there; False if more text is needed."""
        start, end = self._start, self._syntax.end
        assert start is not None
        if end is None:
            return False
        at = self._text.find(end, self._searched)
        if at < 0:
            self._searched = max(0, len(self._text) - len(end) + 1)
            return False
        body = self._text[:at]
        calls = self._syntax.read(start, body, self._tools)
        self._reads += 1
        if calls is None and self._reads < MAX_READS and self._syntax.unfinished(body):
            self._searched = at + len(end)
            return True
        self._text = self._text[at + len(end) :]
        self._start = None
        self._take(calls, start + body + end, out)
        return True

    def _take(self, calls: list[ToolCall] | None, raw: str, out: list[Piece]) -> None:
        if calls is None:
            self._show(raw, out)
            return
        self._blanks = ""
        self._calls += len(calls)
        out.extend(calls)

    def _show(self, text: str, out: list[Piece]) -> None:
        """Content, but for blanks at its end, which wait for what follows."""
        if not text:
            return
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            self._content = True
            out.append(shown)


def _held(text: str, markers: Sequence[str]) -> int:
    """How much of the text's end may be the beginning of a marker."""
    longest = min(len(text), max((len(m) for m in markers), default=1) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(m.startswith(tail) for m in markers):
            return size
    return 0


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts as one."""
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out
