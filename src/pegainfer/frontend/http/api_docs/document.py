"""The OpenAPI document of a server: its operations, and the schemas of the types that it decodes into."""

from __future__ import annotations

from typing import Any

import msgspec

from pegainfer import __version__
from pegainfer.frontend.http.api_docs.fields import ABOUT, Schema, bounds
from pegainfer.frontend.http.api_docs.operations import OPERATIONS, Operation
from pegainfer.frontend.http.errors import ANTHROPIC_PATHS, AnthropicError, ErrorBody
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.fields import CommonFields
from pegainfer.frontend.http.request.neutral import EMPTY, NEUTRAL
from pegainfer.frontend.http.request.sampling_defaults import SamplingDefaults
from pegainfer.frontend.http.routes.completions import CompletionRequest

REF = "#/components/schemas/{name}"
DESCRIPTION = (
    "A field that would change the answer and is not served is a 400 that names it. What asks for nothing "
    "(null, false, an empty value, another server's default) is accepted in any field, and so are fields "
    "that cannot change the answer."
)
EVENT: Schema = {
    "type": "object",
    "description": "of each event; its data is JSON, or [DONE]",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
REFUSED = {
    400: "the request is wrong; the message says where",
    401: "no known key",
    403: "not for this key, or sent by a page of another site",
    404: "no such model, request or response",
    408: "the body stopped coming, or came too slowly",
    413: "the body is too large",
    415: "the body does not say that it is JSON",
    429: "this key's share of the queue is full: Retry-After says when",
    431: "the header is too large",
    500: "a fault of the server's",
    503: "not now: Retry-After says when",
    504: "the request's timeout has passed",
}


def openapi(front: Front) -> Schema:
    """The document with the defaults and bounds that are in force on this server."""
    types = [t for op in OPERATIONS for t in (op.request, op.answer) if _is_struct(t)]
    kinds = list(dict.fromkeys([*types, ErrorBody, AnthropicError]))
    refs, components = msgspec.json.schema_components(kinds, ref_template=REF)
    names = {kind: ref["$ref"].rpartition("/")[2] for kind, ref in zip(kinds, refs, strict=True)}
    for component in components.values():
        if component.get("additionalProperties") is False:
            component["additionalProperties"] = {"enum": list(EMPTY)}
    for op in OPERATIONS:
        if op.request is not None:
            _refine(components[names[op.request]], op.request, front)
    paths: dict[str, Schema] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method.lower()] = _operation(op, names, front)
    secured = bool(front.config.api_key)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pegainfer", "version": __version__, "description": DESCRIPTION},
        "paths": paths,
        "components": {"schemas": components, **({"securitySchemes": schemes} if secured else {})},
        **({"security": [{"bearer": []}, {"x-api-key": []}]} if secured else {}),
    }


def _is_struct(t: object) -> bool:
    return isinstance(t, type) and issubclass(t, msgspec.Struct)


def _operation(op: Operation, names: dict[Any, str], front: Front) -> Schema:
    media = op.answer if isinstance(op.answer, str) else "application/json"
    if isinstance(op.answer, str):
        schema: Schema = {"type": "string"}
    elif isinstance(op.answer, dict):
        schema = op.answer
    else:
        schema = {"$ref": REF.format(name=names[op.answer])}
    content = {media: {"schema": schema}}
    if op.events:
        content["text/event-stream"] = {"schema": EVENT}
    route, below = ANTHROPIC_PATHS
    error = AnthropicError if op.path == route or op.path.startswith(below) else ErrorBody
    refusal = {"application/json": {"schema": {"$ref": REF.format(name=names[error])}}}
    answer: Schema = {"description": "the answer", "content": content}
    if op.links:
        values = {"parameters": {"id": "$response.body#/id"}}
        answer["links"] = {name: {"operationId": name, **values} for name in op.links}
    responses = {"200": answer}
    for status in op.statuses:
        if status != 401 or front.config.api_key:
            responses[str(status)] = {"description": REFUSED[status], "content": refusal}
    out: Schema = {
        "operationId": op.id,
        "tags": [op.tag],
        "summary": op.summary,
        "responses": responses,
    }
    if op.parameters:
        out["parameters"] = list(op.parameters)
    if op.request is not None:
        body = {"application/json": {"schema": {"$ref": REF.format(name=names[op.request])}}}
        out["requestBody"] = {"required": True, "content": body}
    if op.path == "/health":
        out["security"] = []
    return out


def _refine(schema: Schema, kind: type[msgspec.Struct], front: Front) -> None:
    """What the types do not say: meaning, bounds, defaults in force, and which fields are not served."""
    limits = bounds(front.config)
    defaults = _defaults(kind, front)
    unserved = {f.name for f in msgspec.structs.fields(kind) if f.type is Any}
    for name, field in schema["properties"].items():
        if name in unserved:
            field.clear()
            field["enum"] = _neutral(name)
            field["description"] = "not served"
            continue
        if name in ABOUT and "description" not in field:
            field["description"] = ABOUT[name]
        if name in limits and issubclass(kind, CommonFields):
            for choice in field.get("anyOf", [field]):
                if choice.get("type") != "null":
                    choice.update(limits[name])
        if field.get("default", 0) is None:
            del field["default"]
        if name in defaults:
            field["default"] = defaults[name]
    # Unknown fields of these names take other values than the empty ones.
    for name in sorted(NEUTRAL.keys() - schema["properties"].keys()):
        schema["properties"][name] = {"enum": _neutral(name), "description": "not served"}


def _neutral(name: str) -> list[Any]:
    """The values of an unserved field that ask for nothing."""
    values = NEUTRAL.get(name, EMPTY)
    return [*([] if None in values else [None]), *values]


def _defaults(kind: type[msgspec.Struct], front: Front) -> dict[str, Any]:
    """Of the sampling fields that have one."""
    found: SamplingDefaults | None = None
    if issubclass(kind, CompletionRequest):
        found = front.completion_defaults
    elif issubclass(kind, CommonFields):
        found = front.chat_defaults
    if found is None:
        return {}
    values = {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}
    return {**values, "max_output_tokens": values["max_tokens"]} if "max_tokens" in values else values
