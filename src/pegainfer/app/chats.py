"""Conversations as the offline API takes them, read and rendered as the server does."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.tools.prompt import knows_tools, plain_messages
from pegainfer.frontend.tools.styles import AUTO, choose_style

Message = Mapping[str, Any]
_FORMS = "a conversation, which is a list of {'role', 'content'}, or a list of such"


def as_chats(messages: Any) -> list[Any]:
    """One conversation, or several in their order. Raises RequestError for what is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError("bad messages", expected=_FORMS, got=type(messages).__name__)
    single = {isinstance(message, Mapping) for message in messages}
    if len(single) > 1:
        raise RequestError("bad messages", expected=_FORMS, got="a mixture of both")
    return [messages] if True in single else list(messages)


@dataclass(frozen=True)
class Rendering:
    """How conversations become texts; the fields are those of LLM.chat."""

    template: ChatTemplate
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any] | None

    def text(self, chat: Any) -> str:
        """Raises RequestError for messages and tools that are faulty or cannot be rendered."""
        # They come with the web stack, which programs without chats do without.
        from pegainfer.frontend.http.request.body import convert
        from pegainfer.frontend.http.request.messages import Message as Checked
        from pegainfer.frontend.http.request.messages import to_template, with_text_arguments
        from pegainfer.frontend.http.request.tools import ToolParam, shown_tools

        if not isinstance(chat, Sequence) or isinstance(chat, str):
            raise RequestError("bad messages", expected=_FORMS, got=f"{chat!r:.80}")
        try:
            messages = to_template(
                [convert(message, Checked, f"messages[{i}]") for i, message in enumerate(chat)]
            )
            tools = shown_tools(
                [convert(tool, ToolParam, f"tools[{i}]") for i, tool in enumerate(self.tools or ())]
            )
        except ApiError as error:
            raise RequestError(error.message, param=error.param) from None
        try:
            return self._render(messages, tools)
        except RequestError:
            if not any("tool_calls" in message for message in messages):
                raise
            # Templates differ in whether a call's arguments are an object or text.
            return self._render(with_text_arguments(messages), tools)

    def _render(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        template = self.template
        if choose_style(AUTO, template.all_source).name == "hermes" and not knows_tools(template.all_source):
            messages, tools = plain_messages(messages, tools), ()
        return template.render(
            messages,
            now=datetime.datetime.now(),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=list(tools) or None,
            variables=self.variables,
        )
