"""One continuation's text taken apart: reasoning, content and tool calls, streamed or not."""

from __future__ import annotations

from dataclasses import dataclass, field

from pegainfer.frontend.reasoning.think import ThinkScanner, ThinkState, ThinkSyntax
from pegainfer.frontend.tools.call import Tool, ToolCall
from pegainfer.frontend.tools.scanner import Piece, ToolScanner
from pegainfer.frontend.tools.styles import Style


@dataclass(frozen=True, kw_only=True)
class ReplySyntax:
    """How the answers of one request are read.

    tools: those that the model may call; none: calls are not looked for.
    """

    style: Style
    tools: tuple[Tool, ...] = ()
    single: bool = False  # only the first call counts
    reasoning: ThinkSyntax | None = None
    state: ThinkState = ThinkState.CLOSED


@dataclass(slots=True)
class NumberedCall:
    """A call and its place among the calls of the continuation."""

    index: int
    id: str
    name: str
    arguments: str
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the reasoning."""

    text: str


ReplyPiece = Thought | str | NumberedCall  # a str is content


@dataclass(slots=True)
class Parts:
    """What a piece of text adds, each kind for itself."""

    reasoning: str = ""
    content: str = ""
    calls: list[NumberedCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Reply:
    """State of one continuation."""

    def __init__(self, syntax: ReplySyntax) -> None:
        self._syntax = syntax
        self._think = ThinkScanner(syntax.reasoning, syntax.state) if syntax.reasoning else None
        self._tools = ToolScanner(syntax.style.syntax, syntax.tools) if syntax.tools else None
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

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
            elif not (self._syntax.single and self._num_calls):
                out.append(self._numbered(piece))
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
                case _:
                    parts.calls.append(piece)
        return parts

    def finish(self, reason: str | None) -> str | None:
        """The finish reason as clients are told it."""
        return "tool_calls" if reason == "stop" and self.has_calls else reason

    def _numbered(self, call: ToolCall) -> NumberedCall:
        index = self._num_calls
        self._num_calls += 1
        id = call.id or self._syntax.style.new_id(call.name, index)
        return NumberedCall(index, id, call.name, call.arguments, call.whole)
