"""Messages of a chat under construction: texts are joined once, however many pieces a turn comes in."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pegainfer.frontend.http.request.messages import HistoryCall, HistoryFunction, Message

SYSTEMS = ("system", "developer")


class Draft(msgspec.Struct):
    """One message. Empty texts and thoughts are left out of what is joined.

    between: what stands between two texts.
    """

    role: str
    texts: list[str] = msgspec.field(default_factory=list)
    thoughts: list[str] = msgspec.field(default_factory=list)
    calls: list[HistoryCall] = msgspec.field(default_factory=list)
    tool_call_id: str | None = None
    between: str = "\n"

    @property
    def begun(self) -> bool:
        """Whether an assistant has said or called anything in it."""
        return bool(self.calls) or any(self.texts)

    def call(self, id: str | None, name: str, arguments: str) -> None:
        """Adds a call; `arguments` is JSON."""
        function = HistoryFunction(name=name, arguments=arguments)
        self.calls.append(HistoryCall(id=id, type="function", function=function))

    def message(self) -> Message:
        """The chat message of all that was added."""
        return Message(
            role=self.role,
            content=self.between.join(text for text in self.texts if text),
            reasoning_content="\n".join(text for text in self.thoughts if text) or None,
            tool_calls=self.calls or None,
            tool_call_id=self.tool_call_id,
        )


def systems_as_users(drafts: Sequence[Draft]) -> list[Draft]:
    """The same chat for templates that let a system speak at the beginning only.

    What it says later belongs to the user's turn beside it.
    """
    out = list(drafts[:1])
    moved = False
    for draft in drafts[1:]:
        late = draft.role in SYSTEMS
        if (late or (moved and draft.role == "user")) and out[-1].role == "user":
            out[-1].texts += draft.texts
        elif late:
            out.append(Draft("user", draft.texts))
        else:
            out.append(draft)
        moved = late
    return out
