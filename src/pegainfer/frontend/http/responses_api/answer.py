"""An answer of the responses API, whole or as its sequence of events.

response.created ─► in_progress ─► for each item: output_item.added ─► content_part.added ─► deltas ─► done
─► content_part.done ─► output_item.done; last comes response.completed, .incomplete or .failed
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pegainfer.frontend.http.answer import logprobs as lp
from pegainfer.frontend.http.answer.choice import Delta
from pegainfer.frontend.http.answer.generation import Generation
from pegainfer.frontend.http.answer.reply import ReplySyntax
from pegainfer.frontend.http.answer.responses import KEEP_ALIVE, named_event
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.blocks import Block, Blocks, Step
from pegainfer.frontend.http.request.thinking import encoded_thoughts
from pegainfer.frontend.http.responses_api.items import new_id
from pegainfer.frontend.http.responses_api.response import (
    IncompleteDetails,
    InputDetails,
    Response,
    ResponseError,
    ResponseOutputDetails,
    ResponseUsage,
)
from pegainfer.frontend.http.responses_api.tools import called
from pegainfer.frontend.json_object import JsonObject

_PREFIX = {"thinking": "rs", "text": "msg", "call": "fc"}


class ResponseAnswer:
    """Implements flow.Body and flow.Stream. Keeps `response` up to date, which others may read meanwhile."""

    def __init__(
        self,
        front: Front,
        generation: Generation,
        syntax: ReplySyntax,
        response: Response,
        *,
        namespaces: Mapping[str, tuple[str, str]],
        logprobs: bool,
        encrypted: bool,
    ) -> None:
        """
        Args:
            response: without output yet.
            namespaces: from `tools.namespaces`.
            logprobs: texts carry those of their tokens.
            encrypted: thoughts come in the encoded form, too.
        """
        self.response = response
        self._tokenizer = front.tokenizer
        self._generation = generation
        self._blocks = Blocks(syntax, front.end_of_thoughts)
        self._wants_logprobs = logprobs
        self._encrypted = encrypted
        self._namespaces = namespaces
        self._numbers = itertools.count()
        self._items: list[JsonObject] = []  # one a block, as far as it is known
        self._logprobs: list[Any] = []  # of the text block that is open
        self._started = False

    # ------------------------------------------------------------------ flow.Body

    def take(self, delta: Delta) -> None:
        for _ in self._events(delta):
            pass

    def body(self) -> Response:
        self._finish()
        return self.response

    # ------------------------------------------------------------------ flow.Stream

    def feed(self, delta: Delta) -> bytes:
        data = bytearray()
        if not self._started:
            self._started = True
            for name in ("response.created", "response.in_progress"):
                data += self._sent(name, {"response": self.response})
        for name, event in self._events(delta):
            data += self._sent(name, event)
        return bytes(data)

    def end(self) -> bytes:
        self._finish()
        name = "completed" if self.response.status == "completed" else "incomplete"
        return self._sent(f"response.{name}", {"response": self.response})

    def failed(self, error: ApiError) -> bytes:
        self.fail(error)
        return self._sent("response.failed", {"response": self.response})

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def fail(self, error: ApiError) -> None:
        """The response ends with what there is."""
        if self.response.status == "cancelled":
            self._end("cancelled")
            return
        code = "rate_limit_exceeded" if error.code == "overloaded" else "server_error"
        self._end("failed")
        self.response.error = ResponseError(code, error.message)

    # ------------------------------------------------------------------ parts

    def _sent(self, name: str, event: JsonObject) -> bytes:
        return named_event(name, {"type": name, "sequence_number": next(self._numbers), **event})

    def _events(self, delta: Delta) -> Iterator[tuple[str, JsonObject]]:
        entries: list[Any] = []
        if self._wants_logprobs:
            entries = lp.chat_logprobs(self._tokenizer, delta.entries).content
        for step in self._blocks.push(delta):
            if step.block.kind == "call":
                yield from self._call_events(step)
            else:
                yield from self._text_events(step, entries if step.what == "add" else [])

    def _call_events(self, step: Step) -> Iterator[tuple[str, JsonObject]]:
        block, at = step.block, {"output_index": step.block.index}
        if step.what == "open":
            assert block.call is not None
            item = {
                "type": "function_call",
                "id": new_id(_PREFIX["call"]),
                "call_id": block.call.id,
                **called(block.call.name, self._namespaces),
                "arguments": "",
                "status": "in_progress",
            }
            self._items.append(item)
            yield "response.output_item.added", {**at, "item": dict(item)}
            return
        item = self._items[block.index]
        of_item = {"item_id": item["id"], **at}
        if step.what == "add":
            yield "response.function_call_arguments.delta", {**of_item, "delta": step.text}
            return
        item["arguments"] = block.text
        done = {**of_item, "name": item["name"], "arguments": block.text}
        yield "response.function_call_arguments.done", done
        yield self._item_done(block)

    def _text_events(self, step: Step, entries: list[Any]) -> Iterator[tuple[str, JsonObject]]:
        """Of a message or of thoughts; each has one part."""
        block = step.block
        thinking = block.kind == "thinking"
        stem = "response.reasoning_text" if thinking else "response.output_text"
        if step.what == "open":
            self._logprobs = []
            item = _new_item(block)
            self._items.append(item)
            yield "response.output_item.added", {"output_index": block.index, "item": dict(item)}
            place = {"item_id": item["id"], "output_index": block.index, "content_index": 0}
            yield "response.content_part.added", {**place, "part": self._part(block, "")}
            return
        item = self._items[block.index]
        place = {"item_id": item["id"], "output_index": block.index, "content_index": 0}
        if step.what == "add":
            self._logprobs += entries
            more: JsonObject = {} if thinking else {"logprobs": entries}
            yield f"{stem}.delta", {**place, "delta": step.text, **more}
            return
        part = self._part(block, block.text)
        item["content"] = [part]
        if thinking and self._encrypted:
            item["encrypted_content"] = encoded_thoughts(block.text)
        more = {} if thinking else {"logprobs": part["logprobs"]}
        yield f"{stem}.done", {**place, "text": block.text, **more}
        yield "response.content_part.done", {**place, "part": part}
        yield self._item_done(block)

    def _part(self, block: Block, text: str) -> JsonObject:
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": text}
        logprobs = list(self._logprobs) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item_done(self, block: Block) -> tuple[str, JsonObject]:
        item = self._items[block.index]
        item["status"] = "incomplete" if block.cut else "completed"
        self.response.output.append(item)
        return "response.output_item.done", {"output_index": block.index, "item": item}

    def _finish(self) -> None:
        # What was cancelled stays so, even if its last token was on the way already.
        match "abort" if self.response.status == "cancelled" else self._blocks.finish:
            case "length":
                self.response.incomplete_details = IncompleteDetails("max_output_tokens")
                self._end("incomplete")
            case "abort":
                self._end("cancelled")
            case _:
                self._end("completed")

    def _end(self, status: str) -> None:
        generation, response = self._generation, self.response
        prompt, completion = generation.prompt_tokens, generation.completion_tokens
        response.status = status
        response.completed_at = int(time.time()) if status == "completed" else None
        response.usage = ResponseUsage(
            prompt,
            InputDetails(generation.cached_tokens),
            completion,
            ResponseOutputDetails(self._blocks.reasoning_tokens),
            prompt + completion,
        )


def _new_item(block: Block) -> JsonObject:
    item: JsonObject = {"id": new_id(_PREFIX[block.kind]), "status": "in_progress", "content": []}
    if block.kind == "thinking":
        return {"type": "reasoning", "summary": [], **item}
    return {"type": "message", "role": "assistant", **item}
