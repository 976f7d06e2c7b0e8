"""POST /tokenize, /detokenize and /apply_template, in vLLM's shapes."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.answer.logprobs import token_name
from pegainfer.frontend.http.answer.responses import encode, send_bytes, send_json
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import read_request
from pegainfer.frontend.http.request.fields import check_token_ids
from pegainfer.frontend.http.request.limits import bad_value
from pegainfer.frontend.http.request.messages import Message
from pegainfer.frontend.http.request.render import TemplateValue, rendered
from pegainfer.frontend.http.request.thinking import thinking_variables
from pegainfer.frontend.http.request.tools import ToolParam, shown_tools

_OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "chat_template",
    "tools",
    "reasoning_effort",
    "enable_thinking",
)


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    parse_special: bool | None = None  # false: what spells a special token is plain text
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, TemplateValue] | None = None
    chat_template: str | None = None
    tools: list[ToolParam] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None  # does not change the prompt; for requests sent here unchanged
    thinking_budget: int | None = None
    return_token_strs: bool | None = None


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class TemplateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    messages: list[Message] | None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, TemplateValue] | None = None
    chat_template: str | None = None
    tools: list[ToolParam] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None  # does not change the prompt; for requests sent here unchanged
    thinking_budget: int | None = None


async def tokenize(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /tokenize: the ids of a text, or of a rendered conversation. Raises ApiError (400, 404)."""
    request, size = await read_request(scope, receive, TokenizeRequest, front.config)
    front.check_model(request.model)
    text = await _text(front, request, size)
    front.check_counted("messages" if request.prompt is None else "prompt", text)
    special = request.add_special_tokens
    if special is None:
        special = request.messages is None

    def answer() -> bytes:
        parse = request.parse_special is not False
        ids = front.tokenizer.encode(text, add_special_tokens=bool(special), parse_special=parse)
        names = [token_name(front.tokenizer, t) for t in ids] if request.return_token_strs else None
        most = front.engine.info.max_model_len
        return encode(Tokens(count=len(ids), max_model_len=most, tokens=ids, token_strs=names))

    await send_bytes(send, await front.text_work(len(text), answer))


async def _text(front: Front, r: TokenizeRequest, size: int) -> str:
    """What is to be tokenised: the prompt, or the rendered messages."""
    if (r.prompt is None) == (r.messages is None):
        raise bad_value("prompt", "either prompt or messages", "neither" if r.prompt is None else "both")
    if r.prompt is None:
        extra = thinking_variables(front, r)
        return await rendered(front, r, size, shown_tools(r.tools), extra, checked=False)
    for name in _OF_MESSAGES:
        if getattr(r, name) is not None:
            raise bad_value(name, "messages beside it", "a prompt")
    return r.prompt


async def tokenizer_info(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """GET /tokenizer_info: special tokens and chat template, as tokenizer_config.json names them."""
    tokenizer = front.tokenizer
    template = front.template
    await send_json(
        send,
        {
            **tokenizer.config.special_tokens,
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": front.engine.info.max_model_len,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "additional_special_tokens": sorted(
                filter(None, map(tokenizer.token_string, tokenizer.special_ids))
            ),
            "chat_template": None if template is None else template.source,
        },
    )


async def detokenize(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /detokenize: the text of ids, special tokens included. Raises ApiError (400, 404)."""
    request, size = await read_request(scope, receive, DetokenizeRequest, front.config)
    front.check_model(request.model)

    def text() -> str:
        check_token_ids("tokens", request.tokens, front.engine.info.vocab_size)
        return front.tokenizer.decode(request.tokens, skip_special_tokens=False)

    await send_json(send, {"prompt": await front.text_work(size, text)})


async def apply_template(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /apply_template: a conversation as the model reads it. Raises ApiError (400, 404)."""
    request, size = await read_request(scope, receive, TemplateRequest, front.config)
    front.check_model(request.model)
    tools, extra = shown_tools(request.tools), thinking_variables(front, request)
    text = await rendered(front, request, size, tools, extra, checked=False)
    await send_json(send, {"prompt": text})
