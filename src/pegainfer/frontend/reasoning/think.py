"""<think>…</think>: the thoughts before an answer, split off a text that comes in pieces."""

from __future__ import annotations

from enum import Enum

import msgspec


class ThinkState(Enum):
    """Where a continuation begins, which its prompt's end tells."""

    OPEN = "open"  # the template has written <think>
    CLOSED = "closed"  # it has written </think>: nothing is thought
    UNKNOWN = "unknown"  # the model may begin with <think>


class ThinkSyntax(msgspec.Struct, frozen=True):
    start: str = "<think>"
    end: str = "</think>"
    calls: str | None = None  # begins tool calls; models that write it before `end` think no more

    def state_after(self, prompt: str) -> ThinkState:
        """Where what the model writes after this prompt begins."""
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return ThinkState.OPEN
        return ThinkState.CLOSED if tail.endswith(self.end) else ThinkState.UNKNOWN


class ThinkScanner:
    """Splits one continuation into reasoning and content. Blanks next to the markers belong to neither."""

    def __init__(self, syntax: ThinkSyntax, state: ThinkState) -> None:
        self._syntax = syntax
        self._state = state
        self._text = ""  # not decided yet
        self._blanks = ""  # at the end of the reasoning so far
        self._begun = False  # whether reasoning was shown
        self._fresh = False  # the end marker was just read: blanks that follow are dropped

    @property
    def over(self) -> bool:
        """What comes from here on is content."""
        return self._state is ThinkState.CLOSED

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that the text completes."""
        reasoning = content = ""
        self._text += text
        if self._state is ThinkState.UNKNOWN:
            body = self._text.lstrip()
            if not body or (self._syntax.start.startswith(body) and body != self._syntax.start):
                return "", ""
            if body.startswith(self._syntax.start):
                self._state, self._text = ThinkState.OPEN, body[len(self._syntax.start) :]
            else:
                self._state = ThinkState.CLOSED
        if self._state is ThinkState.OPEN:
            end, calls = self._syntax.end, self._syntax.calls
            found = [(self._text.find(m), m) for m in (end, calls) if m is not None and m in self._text]
            if found:
                at, marker = min(found)
                reasoning = self._show(self._text[:at])
                self._blanks = ""
                self._text = self._text[at + (len(end) if marker == end else 0) :]
                self._state, self._fresh = ThinkState.CLOSED, True
            else:
                held = max(_held(self._text, marker) for marker in (end, calls) if marker is not None)
                reasoning = self._show(self._text[: len(self._text) - held])
                self._text = self._text[len(self._text) - held :]
        if self._state is ThinkState.CLOSED:
            content, self._text = self._text, ""
            if self._fresh:
                content = content.lstrip()
                self._fresh = not content
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """The end of the text."""
        text, self._text = self._text, ""
        if self._state is ThinkState.OPEN:
            return self._show(text), ""
        return "", text

    def _show(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown


def _held(text: str, marker: str) -> int:
    """How much of the text's end may be the beginning of the marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
