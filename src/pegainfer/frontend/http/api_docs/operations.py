"""Every operation: what it takes, what it answers, and with which statuses it may refuse."""

from __future__ import annotations

import re

import msgspec

from pegainfer.frontend.http.anthropic.answer import AnthropicMessage
from pegainfer.frontend.http.anthropic.request import CountRequest, MessagesRequest
from pegainfer.frontend.http.anthropic.routes import VERSIONS, TokenCount
from pegainfer.frontend.http.api_docs.fields import Schema
from pegainfer.frontend.http.request.conversation import ChatRequest
from pegainfer.frontend.http.responses_api.request import INCLUDES, ResponsesRequest
from pegainfer.frontend.http.responses_api.response import Response
from pegainfer.frontend.http.responses_api.routes import DEFAULT_LISTED, MAX_LISTED, ItemList
from pegainfer.frontend.http.routes.adapters import LoadAdapterRequest, UnloadAdapterRequest
from pegainfer.frontend.http.routes.chat import ChatCompletion
from pegainfer.frontend.http.routes.completions import Completion, CompletionRequest
from pegainfer.frontend.http.routes.embeddings import EmbeddingList, EmbeddingRequest
from pegainfer.frontend.http.routes.scores import Reranked, RerankRequest, ScoreList, ScoreRequest
from pegainfer.frontend.http.routes.service import AbortRequest, Model, ModelList
from pegainfer.frontend.http.routes.text_routes import (
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
    Tokens,
)
from pegainfer.frontend.http.routes.trace_routes import MOST_SECONDS

# Statuses that any request may be answered with, and those of requests with a body.
ALWAYS = (400, 401, 403, 431, 500)
WITH_BODY = (404, 408, 413, 415, 503)
# Of what runs in the engine: the queue is full or the server is going, or the deadline has passed.
GENERATING = (429, 503, 504)


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
EVENTS: Schema = {"type": "array", "items": {"type": "object"}}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path.

    Args:
        path: a parameter of the path stands in braces.
        answer: the type of the JSON, a schema of it, or a media type for what is no JSON.
        events: the media type text/event-stream is answered too, where the request asks for a stream.
        parameters: as OpenAPI has them.
        links: operations that take the answer's id.
        refusals: statuses beside those of every operation of its kind.
    """

    method: str
    path: str
    tag: str
    summary: str
    answer: type[msgspec.Struct] | Schema | str
    request: type[msgspec.Struct] | None = None
    events: bool = False
    parameters: tuple[Schema, ...] = ()
    links: tuple[str, ...] = ()
    refusals: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        """E.g. get_v1_responses_id."""
        return "_".join([self.method.lower(), *re.findall(r"[\w.]+", self.path)])

    @property
    def statuses(self) -> tuple[int, ...]:
        """Of refusals, in order."""
        return tuple(sorted({*ALWAYS, *(WITH_BODY if self.request else ()), *self.refusals}))


def _in_path(name: str, what: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "description": what, "schema": {"type": "string"}}


def _in_query(name: str, what: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "required": False, "description": what, "schema": schema}


RESPONSE_ID = _in_path("id", "of a response that was stored")
INCLUDE = _in_query("include", "what to show besides", {"type": "string", "enum": list(INCLUDES)})
VERSION: Schema = {
    "name": "anthropic-version", "in": "header", "required": False,
    "description": "the version of Anthropic's API that the client speaks",
    "schema": {"type": "string", "enum": [v.decode() for v in VERSIONS]},
}  # fmt: skip

OPERATIONS = (
    Operation(
        method="POST", path="/v1/chat/completions", tag="OpenAI", summary="Answer a conversation",
        request=ChatRequest, answer=ChatCompletion, events=True, refusals=GENERATING,
    ),
    Operation(
        method="POST", path="/v1/completions", tag="OpenAI", summary="Continue a text",
        request=CompletionRequest, answer=Completion, events=True, refusals=GENERATING,
    ),
    Operation(
        method="POST", path="/v1/responses", tag="OpenAI", summary="Answer a conversation that is kept here",
        request=ResponsesRequest, answer=Response, events=True, refusals=GENERATING,
        links=(
            "get_v1_responses_id", "delete_v1_responses_id", "post_v1_responses_id_cancel",
            "get_v1_responses_id_input_items",
        ),
    ),
    Operation(
        method="POST", path="/v1/responses/input_tokens", tag="OpenAI", summary="A conversation's length",
        request=ResponsesRequest,
        answer=_object(object={"const": "response.input_tokens"}, input_tokens=COUNT),
    ),
    Operation(
        method="GET", path="/v1/responses/{id}", tag="OpenAI", summary="A stored response",
        answer=Response, refusals=(404,),
        parameters=(
            RESPONSE_ID, INCLUDE,
            _in_query("stream", "stored responses are not streamed", {"type": "string", "enum": ["false"]}),
        ),
    ),
    Operation(
        method="DELETE", path="/v1/responses/{id}", tag="OpenAI", summary="Forget a stored response",
        answer=_object(id=TEXT, object={"const": "response"}, deleted={"const": True}),
        parameters=(RESPONSE_ID,), refusals=(404,),
    ),
    Operation(
        method="POST", path="/v1/responses/{id}/cancel", tag="OpenAI", summary="End one in the background",
        answer=Response, parameters=(RESPONSE_ID,), refusals=(404,),
    ),
    Operation(
        method="GET", path="/v1/responses/{id}/input_items", tag="OpenAI", summary="What it was given",
        answer=ItemList, refusals=(404,),
        parameters=(
            RESPONSE_ID, INCLUDE,
            _in_query(
                "limit", f"at most so many; {DEFAULT_LISTED} where it is absent",
                {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
            ),
            _in_query("order", "desc where it is absent", {"type": "string", "enum": ["asc", "desc"]}),
            _in_query("after", "those after this item's id", {"type": "string"}),
        ),
    ),
    Operation(
        method="POST", path="/v1/embeddings", tag="OpenAI", summary="A vector for each text",
        request=EmbeddingRequest, answer=EmbeddingList, refusals=GENERATING,
    ),
    *(
        Operation(
            method="POST", path=path, tag="Scores", summary="A score for each pair of texts",
            request=ScoreRequest, answer=ScoreList, refusals=GENERATING,
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        Operation(
            method="POST", path=path, tag="Scores", summary="Documents in the order of their scores",
            request=RerankRequest, answer=Reranked, refusals=GENERATING,
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Operation(
        method="POST", path="/v1/messages", tag="Anthropic", summary="Answer a conversation",
        request=MessagesRequest, answer=AnthropicMessage, events=True, parameters=(VERSION,),
        refusals=GENERATING,
    ),
    Operation(
        method="POST", path="/v1/messages/count_tokens", tag="Anthropic", summary="A conversation's length",
        request=CountRequest, answer=TokenCount, parameters=(VERSION,),
    ),
    Operation(
        method="GET", path="/v1/models", tag="Models", summary="The served names", answer=ModelList,
    ),
    Operation(
        method="GET", path="/v1/models/{name}", tag="Models", summary="One of them", answer=Model,
        parameters=(_in_path("name", "a served name; it may hold slashes"),), refusals=(404,),
    ),
    Operation(
        method="POST", path="/v1/load_lora_adapter", tag="Models", summary="Load a LoRA adapter (admin key)",
        request=LoadAdapterRequest, answer=_object(lora_name=TEXT, loaded={"const": True}),
        refusals=(403, 404),
    ),
    Operation(
        method="POST", path="/v1/unload_lora_adapter", tag="Models", summary="Unload one (admin key)",
        request=UnloadAdapterRequest, answer=_object(lora_name=TEXT, unloaded={"const": True}),
        refusals=(403, 404),
    ),
    Operation(
        method="POST", path="/tokenize", tag="Text", summary="Token ids of a text or a conversation",
        request=TokenizeRequest, answer=Tokens,
    ),
    Operation(
        method="GET", path="/tokenizer_info", tag="Text", summary="Special tokens and the chat template",
        answer=_object(
            tokenizer_class=TEXT, vocab_size=COUNT, model_max_length=COUNT,
            bos_token_id={"type": ["integer", "null"]}, eos_token_ids={"type": "array", "items": COUNT},
            additional_special_tokens={"type": "array", "items": TEXT},
            chat_template={"type": ["string", "null"]},
        ),
    ),
    Operation(
        method="POST", path="/detokenize", tag="Text", summary="The text of token ids",
        request=DetokenizeRequest, answer=_object(prompt=TEXT),
    ),
    Operation(
        method="POST", path="/apply_template", tag="Text", summary="A conversation as the model gets it",
        request=TemplateRequest, answer=_object(prompt=TEXT),
    ),
    Operation(
        method="POST", path="/v1/abort", tag="Server", summary="End a running request",
        request=AbortRequest, answer=_object(request_id=TEXT, aborted={"const": True}),
    ),
    Operation(
        method="POST", path="/debug/trace", tag="Server",
        summary="Record for some seconds: Chrome's trace events, with the records for `pegainfer trace`",
        parameters=(
            _in_query("seconds", "5 where it is absent", {"type": "number", "maximum": MOST_SECONDS}),
        ),
        answer=_object(traceEvents=EVENTS, displayTimeUnit=TEXT, pegainfer={"type": "object"}),
        refusals=(404,),
    ),
    Operation(
        method="GET", path="/debug/slow", tag="Server", summary="The last slow requests and their causes",
        answer=_object(requests=EVENTS), refusals=(404,),
    ),
    Operation(
        method="GET", path="/health", tag="Server", summary="Whether the process lives",
        answer=_object(status={"const": "ok"}), refusals=(503,),
    ),
    Operation(
        method="GET", path="/ready", tag="Server", summary="Whether a request sent now would be served",
        answer=_object(status={"const": "ready"}), refusals=(503,),
    ),
    Operation(
        method="GET", path="/load", tag="Server", summary="What runs and waits",
        answer=_object(
            server_load=COUNT, running=COUNT, waiting=COUNT, queued_requests=COUNT, queued_tokens=COUNT,
            free_blocks=COUNT, total_blocks=COUNT,
        ),
    ),
    Operation(
        method="GET", path="/version", tag="Server", summary="The program's version",
        answer=_object(version=TEXT),
    ),
    Operation(
        method="GET", path="/metrics", tag="Server", summary="Figures for Prometheus", answer="text/plain",
    ),
    Operation(
        method="GET", path="/openapi.json", tag="Server", summary="This document",
        answer={"type": "object"},
    ),
    Operation(
        method="GET", path="/docs", tag="Server", summary="This document as a page", answer="text/html",
    ),
)  # fmt: skip
