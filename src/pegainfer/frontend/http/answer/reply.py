"""One continuation's text taken apart: reasoning, content and tool calls, streamed or not."""

from __future__ import annotations

import msgspec

from pegainfer.frontend.reasoning.think import ThinkScanner, ThinkState, ThinkSyntax
from pegainfer.frontend.tools.call import Tool
from pegainfer.frontend.tools.pieces import CallBegun, CallEnded, CallText, Piece
from pegainfer.frontend.tools.scanner import ToolScanner
from pegainfer.frontend.tools.styles import Style


class ReplySyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of one request are read.

    tools: those that the model may call; none: calls are not looked for.
    """

    style: Style
    tools: tuple[Tool, ...] = ()
    single: bool = False  # only the first call counts
    reasoning: ThinkSyntax | None = None
    state: ThinkState = ThinkState.CLOSED


class NewCall(msgspec.Struct, frozen=True):
    """A call that begins, and its place among the calls of the continuation."""

    index: int
    id: str
    name: str


class CallPart(msgspec.Struct):
    """What a piece of text adds to one call. new: None where the call began before."""

    index: int
    new: NewCall | None = None
    arguments: str = ""


class Thought(msgspec.Struct, frozen=True):
    """A piece of the reasoning."""

    text: str


# A str is content; texts and the end are of the call that began last.
ReplyPiece = Thought | str | NewCall | CallText | CallEnded


class Parts(msgspec.Struct):
    """What a piece of text adds, each kind for itself."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = msgspec.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Reply:
    """State of one continuation."""

    def __init__(self, syntax: ReplySyntax) -> None:
        self._syntax = syntax
        self._think = ThinkScanner(syntax.reasoning, syntax.state) if syntax.reasoning else None
        self._tools = ToolScanner(syntax.style.syntax, syntax.tools) if syntax.tools else None
        self._num_calls = 0
        self._sorted_call = 0  # the call that `push` has seen last
        self._dropping = False  # the call that is open does not count
        self.has_calls = False  # one at least whose arguments are whole

    @property
    def thinking(self) -> bool:
        """Whether the next text may be reasoning."""
        return self._think is not None and not self._think.over

    def pieces(self, text: str, finish: str | None) -> list[ReplyPiece]:
        """What the next text completes, in order; with a finish reason, the last of it."""
        out: list[ReplyPiece] = []
        content = text
        if self._think is not None:
            reasoning, content = self._think.push(text)
            if finish is not None:
                last, rest = self._think.flush()
                reasoning += last
                content += rest
            if reasoning:
                out.append(Thought(reasoning))
        pieces: list[Piece] = [content] if content else []
        if self._tools is not None:
            pieces = self._tools.push(content)
            if finish is not None:
                pieces += self._tools.flush(truncated=finish != "stop")
        for piece in pieces:
            if isinstance(piece, str):
                out.append(piece)
            elif isinstance(piece, CallBegun):
                self._begin(piece, out)
            elif not self._dropping:
                out.append(piece)
                self.has_calls |= piece == CallEnded(whole=True)
        return out

    def push(self, text: str, finish: str | None) -> Parts:
        """The same as `pieces`, sorted by kind."""
        parts = Parts()
        for piece in self.pieces(text, finish):
            match piece:
                case Thought():
                    parts.reasoning += piece.text
                case str():
                    parts.content += piece
                case NewCall():
                    self._sorted_call = piece.index
                    parts.calls.append(CallPart(piece.index, piece))
                case CallText():
                    if not parts.calls:  # the call began before
                        parts.calls.append(CallPart(self._sorted_call))
                    parts.calls[-1].arguments += piece.text
        return parts

    def finish(self, reason: str | None) -> str | None:
        """The finish reason as clients are told it: a call that broke off is not to be made."""
        return "tool_calls" if reason == "stop" and self.has_calls else reason

    def _begin(self, call: CallBegun, out: list[ReplyPiece]) -> None:
        index = self._num_calls
        self._dropping = self._syntax.single and index > 0
        if not self._dropping:
            self._num_calls += 1
            id = call.id or self._syntax.style.new_id(call.name, index)
            out.append(NewCall(index, id, call.name))
