"""What a scanner finds in an answer: content, and calls as they are written.

    CallBegun ──► CallText, CallText, … ──► CallEnded, then content or the next call

Texts of a call, joined, are its arguments: a JSON object, unless the model or the answer's end broke it off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pegainfer.frontend.tools.call import ToolCall


class CallBegun(msgspec.Struct, frozen=True):
    """id: where the model's format has one."""

    name: str
    id: str | None = None


class CallText(msgspec.Struct, frozen=True):
    """A piece of the arguments, never empty."""

    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """whole: the arguments are a JSON object."""

    whole: bool = True


Piece = str | CallBegun | CallText | CallEnded  # a str is content


def pieces_of(call: ToolCall) -> list[Piece]:
    """A call that is known as a whole."""
    text = [CallText(call.arguments)] if call.arguments else []
    return [CallBegun(call.name, call.id), *text, CallEnded(call.whole)]


def calls_of(pieces: Iterable[Piece]) -> list[ToolCall]:
    """The calls that the pieces of a whole answer make up."""
    calls: list[ToolCall] = []
    begun, texts = CallBegun(""), list[str]()
    for piece in pieces:
        match piece:
            case CallBegun():
                begun, texts = piece, []
            case CallText(text):
                texts.append(text)
            case CallEnded(whole):
                calls.append(ToolCall(begun.name, "".join(texts), begun.id, whole))
    return calls


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbouring texts as one."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, str) and isinstance(last, str):
            out[-1] = last + piece
        elif isinstance(piece, CallText) and isinstance(last, CallText):
            out[-1] = CallText(last.text + piece.text)
        else:
            out.append(piece)
    return out
