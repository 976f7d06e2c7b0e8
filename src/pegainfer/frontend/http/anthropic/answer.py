"""An answer in Anthropic's shape, whole or as its sequence of events.

message_start ─► (content_block_start ─► content_block_delta … ─► content_block_stop) … ─► message_delta
─► message_stop; `ping` in a long silence, `error` in place of the rest where it fails
"""

from __future__ import annotations

import hashlib

import msgspec

from pegainfer.frontend.http.answer.choice import Delta
from pegainfer.frontend.http.answer.generation import Generation
from pegainfer.frontend.http.answer.reply import ReplySyntax
from pegainfer.frontend.http.answer.responses import KEEP_ALIVE, named_event
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.blocks import Block, Blocks, Step
from pegainfer.frontend.http.request.thinking import encoded_thoughts
from pegainfer.frontend.json_object import JsonObject
from pegainfer.frontend.tools.call import read_object


class MessageOutputDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """input_tokens: of the prompt, those from the prefix cache not counted."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputDetails


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[JsonObject]
    stop_reason: str | None  # null: it was aborted
    stop_sequence: str | None
    usage: MessageUsage


class MessageAnswer:
    """Implements flow.Body and flow.Stream."""

    def __init__(
        self,
        front: Front,
        generation: Generation,
        syntax: ReplySyntax,
        max_tokens: int | None,
        *,
        hide_thoughts: bool,
    ) -> None:
        """
        Args:
            max_tokens: of the request, or the default; None: up to the context's end.
            hide_thoughts: they are sent in their signature alone.
        """
        self._generation = generation
        self._blocks = Blocks(syntax, front.end_of_thoughts)
        self._max_tokens = max_tokens
        self._hide = hide_thoughts
        self._id = "msg_" + generation.id
        self._model = front.answered_name(generation.adapter)
        self._started = False

    # ------------------------------------------------------------------ flow.Body

    def take(self, delta: Delta) -> None:
        for _ in self._blocks.push(delta):
            pass

    def body(self) -> AnthropicMessage:
        content = [self._whole(block) for block in self._blocks.blocks]
        return self._message(content, self._stop_reason(), self._stop_sequence())

    # ------------------------------------------------------------------ flow.Stream

    def feed(self, delta: Delta) -> bytes:
        data = bytearray()
        if not self._started:
            self._started = True
            start = {"type": "message_start", "message": self._message([], None, None)}
            data += named_event("message_start", start)
        for step in self._blocks.push(delta):
            for event in self._events(step):
                data += named_event(event["type"], event)
        return bytes(data)

    def end(self) -> bytes:
        ended = {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()},
            "usage": self._usage(),
        }
        return named_event("message_delta", ended) + named_event("message_stop", {"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", error.anthropic_body)

    def keep_alive(self) -> bytes:
        return named_event("ping", {"type": "ping"}) if self._started else KEEP_ALIVE

    # ------------------------------------------------------------------ parts

    def _message(
        self, content: list[JsonObject], stop_reason: str | None, stop_sequence: str | None
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        generation = self._generation
        return MessageUsage(
            input_tokens=generation.prompt_tokens - generation.cached_tokens,
            cache_read_input_tokens=generation.cached_tokens,
            output_tokens=generation.completion_tokens,
            output_tokens_details=MessageOutputDetails(self._blocks.reasoning_tokens),
        )

    def _stop_reason(self) -> str | None:
        finish = self._blocks.finish
        if finish == "length":
            limit = self._max_tokens
            reached = limit is not None and self._generation.completion_tokens >= limit
            return "max_tokens" if reached else "model_context_window_exceeded"
        if finish != "stop":
            return None
        if self._blocks.has_calls:
            return "tool_use"
        return "end_turn" if self._stop_sequence() is None else "stop_sequence"

    def _stop_sequence(self) -> str | None:
        reason = self._blocks.stop_reason
        return reason if isinstance(reason, str) else None

    def _signature(self, block: Block) -> str:
        """Clients keep thoughts only with one; it is read only where it holds them."""
        if self._hide:
            return encoded_thoughts(block.text)
        return hashlib.sha256(block.text.encode()).hexdigest()

    def _whole(self, block: Block) -> JsonObject:
        match block.kind:
            case "thinking":
                shown = "" if self._hide else block.text
                return {"type": "thinking", "thinking": shown, "signature": self._signature(block)}
            case "text":
                return {"type": "text", "text": block.text}
            case "call":
                # Arguments that the limit cut off are no object; the stream shows what there was.
                return {**_call(block), "input": read_object(block.text) or {}}

    def _events(self, step: Step) -> list[JsonObject]:
        block, index = step.block, step.block.index
        thinking = block.kind == "thinking"
        if step.what == "open":
            return [{"type": "content_block_start", "index": index, "content_block": _opened(block)}]
        if step.what == "add":
            return [] if thinking and self._hide else [_delta(index, _added(block, step.text))]
        last: list[JsonObject] = [{"type": "content_block_stop", "index": index}]
        if thinking:
            signed = {"type": "signature_delta", "signature": self._signature(block)}
            last.insert(0, _delta(index, signed))
        return last


def _call(block: Block) -> JsonObject:
    assert block.call is not None
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}


def _delta(index: int, delta: JsonObject) -> JsonObject:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _opened(block: Block) -> JsonObject:
    match block.kind:
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case "call":
            return _call(block)


def _added(block: Block, text: str) -> JsonObject:
    match block.kind:
        case "thinking":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}
