"""Chat messages to a prompt by the model's Jinja2 template, rendered as transformers renders it.

The template comes from a model file and the messages from a client, so it runs in Jinja's immutable sandbox.
"""

from __future__ import annotations

import datetime
import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context

from pegainfer.contract.errors import ConfigError, RequestError
from pegainfer.frontend.template_access import QuickSandbox
from pegainfer.frontend.template_messages import cut_at_mark, with_end_mark, with_parts

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 64 << 20
MAX_PRODUCT = 1 << 20  # characters or items that `*` makes, and what `**` may make of a number
RENDER_SECONDS = 5.0
_TICK = "__tick"
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")


class ChatTemplate:
    """A compiled template. Safe to share among threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        seconds: float = RENDER_SECONDS,
        *,
        tool_source: str | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            source: the template's text.
            tool_source: the template that takes its place where there are tools.
            special_tokens: variables such as bos_token and eos_token.
            seconds: a render may take.
            defaults: variables of every chat that does not set them itself, e.g. enable_thinking.

        Raises ConfigError where the template does not compile, and for defaults that the server sets itself.
        """
        wrong = sorted(defaults.keys() & {*_RESERVED, *(special_tokens or {})})
        if wrong:
            what, where = "template variables that the server sets itself", "default_chat_template_kwargs"
            raise ConfigError(what, got=" ".join(wrong), where=where)
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(
                "chat template is too long", expected=f"≤ {MAX_TEMPLATE_CHARS} characters", got=len(source)
            )
        self.source = source
        self.tool_source = tool_source
        self._with_tools = None if tool_source is None else ChatTemplate(tool_source, special_tokens, seconds)
        self._seconds = seconds
        self._special_tokens = dict(special_tokens or {})
        self._defaults = dict(defaults)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as e:
            line = f", line {e.lineno}" if isinstance(e, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(
                f"chat template does not compile{line}",
                got=_one_line(e),
                remedy="give another template or use a model with a sound one",
            ) from None
        except RecursionError:
            raise ConfigError("chat template does not compile", got="too deeply nested") from None

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template looks up, as a caller may give them."""
        return frozenset(meta.find_undeclared_variables(_environment().parse(self.source)))

    @property
    def all_source(self) -> str:
        """The text of the template, and of the one for tools where there is one."""
        return self.source + (self.tool_source or "")

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether the template shows a message only where its content is a list of parts.

        A probe is rendered in both forms, which judges every way to go through the parts alike.
        """
        probe = "said-by-the-user"

        def shows(content: str | list[dict[str, str]]) -> bool:
            message = {"role": "user", "content": content}
            variables = {
                "messages": [message],
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
            }
            try:
                text = self.render_variables({**self._special_tokens, **variables}, datetime.datetime.now())
                return probe in text
            except RequestError:
                return False

        return not shows(probe) and shows([{"type": "text", "text": probe}])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        now: datetime.datetime,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens spelt out: encode it with add_special_tokens=False.

        now: what `strftime_now` formats; transformers passes the local time without a zone.
        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: end within the last message, which the model goes on with.
        variables: further ones that the template may read, e.g. enable_thinking; they go before the defaults.
        Raises RequestError where the template refuses the messages or cannot render them.
        """
        prepared = self.prepare(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            variables=variables,
        )
        text = self.render_variables(prepared, now)
        return cut_at_mark(text) if continue_final_message else text

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """All variables of a render; with `continue_final_message` the text is then cut by `cut_at_mark`.

        Raises RequestError for variables that requests may not set.
        """
        variables = variables or {}
        wrong = sorted(variables.keys() & {*_RESERVED, *self._special_tokens})
        if wrong:
            raise RequestError(
                "template variables that the server sets itself",
                param="chat_template_kwargs",
                got=" ".join(wrong),
            )
        template = self._with_tools if tools and self._with_tools is not None else self
        if template.takes_parts:
            messages = with_parts(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "add_generation_prompt and continue_final_message exclude each other",
                    param="continue_final_message",
                )
            messages = with_end_mark(messages)
        return {
            **self._special_tokens,
            **self._defaults,
            **variables,
            "messages": list(messages),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }

    def render_variables(self, variables: Mapping[str, Any], now: datetime.datetime) -> str:
        """Renders the template with exactly these variables. `now` and errors are those of `render`."""
        if variables.get("tools") and self._with_tools is not None:
            return self._with_tools.render_variables(variables, now)
        parts: list[str] = []
        size = 0
        deadline = _Deadline(self._seconds)
        context = {**variables, "strftime_now": now.strftime, _TICK: deadline.tick}
        try:
            for part in self._template.generate(context):
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise RequestError("the rendered chat is too long", param="messages")
                parts.append(part)
        except RequestError:
            raise
        except Exception as e:  # a template may fail in any way on the messages that it gets
            raise RequestError(
                "the chat template cannot render these messages", param="messages", got=_one_line(e)
            ) from None
        return "".join(parts)


class _Deadline:
    """Counts the iterations of a template's loops, and raises RequestError once the render's time is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._rounds = 0

    def tick(self) -> None:
        self._rounds += 1
        if not self._rounds & 0xFF and time.monotonic() > self._end:
            raise RequestError(
                "the chat template takes too long", expected=f"≤ {self._seconds:g} s", param="messages"
            )


class _Environment(QuickSandbox):
    """Every iteration of a loop and every call of a macro checks the deadline; no product is huge."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _TICK, [], [], None, None, lineno=loop.lineno)
        for macro in tree.find_all(nodes.Macro):
            tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            macro.body.insert(0, nodes.ExprStmt(tick, lineno=macro.lineno))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            size = len(one) if isinstance(one, str | list | tuple) else abs(one) if operator == "**" else 0
            if isinstance(other, int) and size and size * abs(other) > MAX_PRODUCT:
                raise OverflowError(f"a product of more than {MAX_PRODUCT}")
        return super().call_binop(context, operator, left, right)


class _Refusal(Exception):
    """What a template's raise_exception raises."""


class _GenerationTag(ext.Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's words for training: here only a block."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> _Environment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _GenerationTag])
    env.filters["tojson"] = _to_json
    env.filters[_TICK] = _ticking
    env.globals["raise_exception"] = _raise_exception
    return env


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@jinja2.pass_context
def _ticking(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """What a loop goes through, with a tick each."""
    tick = context[_TICK]
    for item in items:
        tick()
        yield item


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:500]
