"""What a scanner has to know of a family's way to write calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pegainfer.frontend.tools.call import Tool, ToolCall

BLANKS = " \n\t\r"  # JSON's


class ArgumentStream(Protocol):
    """Turns what a model writes as a call's arguments into the text of a JSON object, piece by piece."""

    @property
    def done(self) -> bool:
        """The end of the arguments was read; `rest` comes after them."""

    @property
    def broken(self) -> bool:
        """What comes next, which is `rest`, is not in the family's form."""

    @property
    def whole(self) -> bool:
        """What was passed on is a JSON object."""

    @property
    def rest(self) -> str:
        """What was pushed and neither passed on nor dropped."""

    def push(self, text: str) -> str:
        """What the text adds to the arguments."""

    def flush(self) -> str:
        """The end of the text: what is still to be shown of it."""


class Tail(msgspec.Struct, frozen=True):
    """What follows a call's arguments.

    closers: characters that are dropped.
    end: the marker that closes the section; None where there is none.
    more: a character after which the section holds another call.
    resume: where the search for calls goes on after arguments in no known form; None: at the text's end.
    """

    closers: str = BLANKS
    end: str | None = None
    more: str = ""
    resume: str | None = None

    def without_closers(self, text: str) -> str:
        """The end of arguments in no known form: the brace of an object around them is not theirs."""
        text = text.rstrip(self.closers.replace("}", ""))
        return text.removesuffix("}") if "}" in self.closers else text


class Head(msgspec.Struct, frozen=True):
    """The beginning of a call, from which on it is one whatever follows.

    length: characters of the section's body before the arguments.
    """

    name: str
    id: str | None
    length: int
    arguments: ArgumentStream
    tail: Tail


class Syntax(Protocol):
    """How a model family writes calls: sections of text between a start marker and an end marker.

    A section is a call from its head on, and its arguments are passed on as they come. One whose head is
    written in another way (a tool that was not offered, arguments before the name) is read as a whole.
    """

    @property
    def starts(self) -> tuple[str, ...]:
        """Markers that open a section; none of them begins with another."""

    @property
    def end(self) -> str | None:
        """What closes a section; None: the end of the text does."""

    @property
    def skips(self) -> tuple[str, ...]:
        """Markers around sections, which are neither calls nor content there."""

    @property
    def leading(self) -> bool:
        """Sections are only looked for at the beginning of the text."""

    def head(self, start: str, body: str, tools: Sequence[Tool]) -> Head | None:
        """The head that a section begins with; None where it has none, or none yet. Only offered tools count.

        start: the marker; empty for a further call of the same section.
        """

    def possible(self, start: str, body: str) -> bool:
        """False as soon as a section that begins like this cannot be a call."""

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        """The calls of a whole section; None for what is no call."""

    def unfinished(self, body: str) -> bool:
        """Whether an end marker after `body` stands within a string of the section."""

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """What can be told of a section that was cut off."""
