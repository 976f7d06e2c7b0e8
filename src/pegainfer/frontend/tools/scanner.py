"""Finds tool calls in a text that comes in pieces; where it is cut makes no difference to what is found.

outside ──marker──► section ──head──► arguments ──end──► after ──► outside, or the section's next call
           no call: the marker is text ◄──┘   └──► faulty: the rest of the section is passed on as it is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from pegainfer.frontend.tools.call import Tool, ToolCall
from pegainfer.frontend.tools.pieces import CallBegun, CallEnded, CallText, Piece, joined, pieces_of
from pegainfer.frontend.tools.syntax import Head, Syntax

# A section whose end marker may stand within a string is read so often at most, then taken for text.
MAX_READS = 64


class ToolScanner:
    """State of one continuation.

    Content comes out as soon as it cannot be part of a call, and arguments as they are written. Blanks around
    calls are dropped.
    """

    def __init__(self, syntax: Syntax, tools: Sequence[Tool]) -> None:
        self._syntax = syntax
        self._tools = tools
        self._markers = syntax.starts + syntax.skips
        self._state: Callable[[list[Piece]], bool] = self._outside
        self._text = ""  # not decided yet
        self._start = ""  # the marker of the section that is open
        self._head: Head | None = None  # of the call that is open
        self._searched = 0  # how far an end marker was looked for in the section
        self._reads = 0
        self._held = ""  # blanks and markers at the end of the content, dropped if a call follows
        self._content = False  # whether content was shown
        self._called = False  # whether there was a call
        self._after_call = False  # nothing but blanks and markers came since

    def push(self, text: str) -> list[Piece]:
        """What the text completes, in order."""
        self._text += text
        out: list[Piece] = []
        while self._state(out):
            pass
        return joined(out)

    def flush(self, *, truncated: bool) -> list[Piece]:
        """The end of the text. `truncated`: a limit ended it, not the model."""
        out: list[Piece] = []
        text, self._text = self._text, ""
        if self._state == self._outside:
            self._show(text, out)
        elif self._state == self._section:
            self._flush_section(text, out, truncated=truncated)
        elif self._state != self._after:
            self._flush_call(text, out)
        self._state = self._outside
        marked = bool(self._held.strip())
        if self._held and not (truncated if marked else self._called):
            out.append(self._held)
        self._held = ""
        return joined(out)

    def _flush_section(self, text: str, out: list[Piece], *, truncated: bool) -> None:
        calls = self._syntax.read(self._start, text, self._tools)
        if calls is None and truncated:
            calls = self._syntax.rest(self._start, text, self._tools)
            calls[-1:] = [replace(call, whole=False) for call in calls[-1:]]
        self._take(calls or None, self._start + text, out)

    def _flush_call(self, text: str, out: list[Piece]) -> None:
        assert self._head is not None
        arguments = self._head.arguments
        last = self._head.tail.without_closers(text) if arguments.broken else arguments.flush()
        out += [CallText(last)] if last else []
        out.append(CallEnded(whole=arguments.whole))

    # ------------------------------------------------------------------ states: True if there is more to do

    def _outside(self, out: list[Piece]) -> bool:
        """Shows what is content, up to a marker."""
        if self._syntax.leading and not self._called:
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
            kept = len(self._text) - _partial(self._text, self._markers)
            self._show(self._text[:kept], out)
            self._text = self._text[kept:]
            return False
        at, marker = min(found)
        self._show(self._text[:at], out)
        self._text = self._text[at + len(marker) :]
        if marker in self._syntax.starts:
            self._open(marker)
        elif not self._after_call:
            self._held += marker
        return True

    def _section(self, out: list[Piece]) -> bool:
        """Decides whether the section is a call: by its head, else by all of it."""
        syntax, start = self._syntax, self._start
        if head := syntax.head(start, self._text, self._tools):
            self._head, self._state = head, self._arguments
            self._text = self._text[head.length :]
            self._begin_calls()
            out.append(CallBegun(head.name, head.id))
            return True
        if not syntax.possible(start, self._text):
            self._state = self._outside
            self._show(start, out)
            return True
        if syntax.end is None:
            return False
        at = self._text.find(syntax.end, self._searched)
        if at < 0:
            self._searched = max(0, len(self._text) - len(syntax.end) + 1)
            return False
        body = self._text[:at]
        calls = syntax.read(start, body, self._tools)
        self._reads += 1
        if calls is None and self._reads < MAX_READS and syntax.unfinished(body):
            self._searched = at + len(syntax.end)
            return True
        self._text = self._text[at + len(syntax.end) :]
        self._state = self._outside
        self._take(calls, start + body + syntax.end, out)
        return True

    def _arguments(self, out: list[Piece]) -> bool:
        """Passes arguments on, up to their end or to what is no argument."""
        assert self._head is not None
        arguments = self._head.arguments
        text, self._text = self._text, ""
        if shown := arguments.push(text):
            out.append(CallText(shown))
        if arguments.done:
            out.append(CallEnded())
            self._text, self._state = arguments.rest, self._after
        elif arguments.broken:
            self._text, self._searched, self._state = arguments.rest, 0, self._faulty
        return arguments.done or arguments.broken

    def _after(self, out: list[Piece]) -> bool:
        """Drops what closes a call."""
        assert self._head is not None
        tail = self._head.tail
        rest = self._text.lstrip(tail.closers)
        if not rest and (tail.end or tail.more):
            return False
        if tail.more and rest[0] == tail.more:
            self._text = rest[1:]
            self._open("")
            return True
        if tail.end is not None and rest.startswith(tail.end):
            self._text = rest[len(tail.end) :]
        elif tail.end is not None and tail.end.startswith(rest):
            return False
        self._state = self._outside
        return True

    def _faulty(self, out: list[Piece]) -> bool:
        """Waits for the end of a section whose arguments are in no form that is known."""
        assert self._head is not None
        tail = self._head.tail
        at = -1 if tail.resume is None else self._text.find(tail.resume, self._searched)
        if tail.resume is None or at < 0:
            self._searched = max(0, len(self._text) - len(tail.resume or "") + 1)
            return False
        if last := tail.without_closers(self._text[:at]):
            out.append(CallText(last))
        out.append(CallEnded(whole=False))
        self._text = self._text[at:].removeprefix(tail.end or "")
        self._state = self._outside
        return True

    # ------------------------------------------------------------------ parts

    def _open(self, marker: str) -> None:
        self._start, self._searched, self._reads = marker, 0, 0
        self._state = self._section

    def _begin_calls(self) -> None:
        self._held = ""
        self._called = self._after_call = True

    def _take(self, calls: list[ToolCall] | None, raw: str, out: list[Piece]) -> None:
        """The calls of a section that was read as a whole; None: it is text."""
        if calls is None:
            self._show(raw, out)
            return
        self._begin_calls()
        for call in calls:
            out += pieces_of(call)

    def _show(self, text: str, out: list[Piece]) -> None:
        """Content, but for blanks at its end, which wait for what follows."""
        shown = text.rstrip()
        if not shown:
            self._held += text
            return
        out.append(self._held + shown)
        self._held = text[len(shown) :]
        self._content = True
        self._after_call = False


def _partial(text: str, markers: Sequence[str]) -> int:
    """How much of the text's end may be the beginning of a marker."""
    longest = min(len(text), max((len(m) for m in markers), default=1) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(m.startswith(tail) for m in markers):
            return size
    return 0
