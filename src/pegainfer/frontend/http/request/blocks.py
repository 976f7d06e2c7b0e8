"""A continuation as blocks in order (thoughts, text, calls), for routes whose answers are lists of these.

    open ──► add, add, … ──► close, then the next block opens

Streamed and whole answers are made of the same steps, so that they hold the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from pegainfer.frontend.http.answer.choice import Delta
from pegainfer.frontend.http.answer.reply import NewCall, Reply, ReplyPiece, ReplySyntax, Thought
from pegainfer.frontend.tools.pieces import CallEnded, CallText

BlockKind = Literal["thinking", "text", "call"]


class Block(msgspec.Struct):
    """text: of thoughts or content; of a call its arguments, as JSON."""

    index: int
    kind: BlockKind
    text: str = ""
    call: NewCall | None = None
    cut: bool = False  # a limit or an abort ended the answer within it; known when it closes


class Step(NamedTuple):
    """What happens to a block. text: what is added to it."""

    what: Literal["open", "add", "close"]
    block: Block
    text: str = ""


class Blocks:
    """State of one continuation."""

    def __init__(self, syntax: ReplySyntax, end_of_thoughts: int | None) -> None:
        """`end_of_thoughts`: the id of the token that ends the reasoning, where it is one."""
        self._reply = Reply(syntax)
        self._end_token = end_of_thoughts
        self._open: Block | None = None
        self._counting = self._reply.thinking
        self._early_tokens = 0  # up to the end of what may be thoughts
        self.blocks: list[Block] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def has_calls(self) -> bool:
        return self._reply.has_calls

    @property
    def reasoning_tokens(self) -> int:
        """Of the thoughts, the token that ended them included."""
        thought = bool(self.blocks) and self.blocks[0].kind == "thinking"
        return self._early_tokens if thought else 0

    def push(self, delta: Delta) -> Iterator[Step]:
        """The steps of what comes next; all of them must be taken."""
        pieces = self._reply.pieces(delta.text, delta.finish)
        self._count(delta.tokens)
        for piece in pieces:
            yield from self._piece(piece)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason
            yield from self._close(cut=delta.finish in ("length", "abort"))

    def _piece(self, piece: ReplyPiece) -> Iterator[Step]:
        match piece:
            case NewCall():
                yield from self._close()
                yield self._opened("call", piece)
            case CallText():
                yield self._added(piece.text)
            case CallEnded():
                yield from self._close(cut=not piece.whole)
            case Thought() | str():
                yield from self._text(piece)

    def _text(self, piece: Thought | str) -> Iterator[Step]:
        kind: BlockKind = "thinking" if isinstance(piece, Thought) else "text"
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            yield self._opened(kind)
        yield self._added(piece.text if isinstance(piece, Thought) else piece)

    def _opened(self, kind: BlockKind, call: NewCall | None = None) -> Step:
        self._open = Block(len(self.blocks), kind, call=call)
        self.blocks.append(self._open)
        return Step("open", self._open)

    def _added(self, text: str) -> Step:
        assert self._open is not None
        self._open.text += text
        return Step("add", self._open, text)

    def _close(self, *, cut: bool = False) -> Iterator[Step]:
        if self._open is not None:
            block, self._open = self._open, None
            block.cut = cut
            yield Step("close", block)

    def _count(self, tokens: list[int]) -> None:
        if not self._counting:
            return
        if self._end_token in tokens:
            self._early_tokens += tokens.index(self._end_token) + 1
            self._counting = False
        else:
            self._early_tokens += len(tokens)
            self._counting = self._reply.thinking
