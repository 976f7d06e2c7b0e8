"""Which values of a request ask for nothing, and which fields other servers' clients send.

One rule holds on every route and at every depth. A value that asks for nothing is accepted, also in a field
that the server does not know. A field that cannot change the answer is accepted (`Harmless`). A field that
would change the answer and is not served is a 400 that names it.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import msgspec
import msgspec.inspect as mi

from pegainfer.frontend.http.request.limits import unsupported

# The type of fields that cannot change the answer: they take any value. Fields of type `Any` are not served.
Harmless = Annotated[Any, msgspec.Meta(description="accepted; cannot change the answer")]

EMPTY: tuple[Any, ...] = (None, False, "", [], {})
# Values that ask for nothing where these are not the empty ones. An empty value of these fields may ask for
# something: `do_sample: false` is greedy, `web_search_options: {}` is a search with default options.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_bos": (True,),
    "add_bos_token": (True,),
    "add_special": (),
    "allowed_callers": ([], ["direct"]),
    "best_of": (1,),
    # No edit removes anything from the conversation.
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "detokenize": (True,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "enable_thinking": (),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "modalities": ([], ["text"]),
    "n_keep": (0,),
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "parse_special": (True,),
    "parse_tool_calls": (True,),
    "penalty_alpha": (0,),
    "repeat_penalty": (1,),
    "separate_reasoning": (True,),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "think": (),
    "thinking": ("", [], {}),
    # Creates a thread for later requests; this one is answered the same, and clients send all messages again.
    "thread": (False, {}, {"type": "create"}),
    "type": ("text", "message"),  # of a chat's message
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "typical": (1,),
    "typical_p": (1,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
# Fields of other servers with the field that serves the same purpose here.
REMEDIES = {
    "add_bos": "add_special_tokens",
    "add_bos_token": "add_special_tokens",
    "add_special": "add_special_tokens",
    "do_sample": "temperature: 0",
    "ebnf": "structured_outputs.grammar",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "structured_outputs.grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "json_schema": "structured_outputs.json",
    "max_tokens_to_sample": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "regex": "structured_outputs.regex",
    "repeat_penalty": "repetition_penalty",
    "think": "reasoning_effort",
    "thinking": "reasoning_effort",
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a field of this name with this value leaves the answer as it is without the field."""
    if value is None:
        return True
    return any(_same_json(value, neutral) for neutral in NEUTRAL.get(name, EMPTY))


def _same_json(one: Any, other: Any) -> bool:
    """Equality of scalars and containers as JSON has it: 1 and 1.0 are the same, 1 and true are not."""
    return bool(one == other) and isinstance(one, bool) is isinstance(other, bool)


def refuse_unserved(request: msgspec.Struct, where: str = "") -> None:
    """Raises ApiError (400) that names the first field which asks for something that is not served.

    Args:
        where: the field of the body that holds these, with a dot.
    """
    for name in _unserved(type(request)):
        value = getattr(request, name)
        if value is not None and not asks_for_nothing(name, value):
            raise unsupported(where + name, remedy=remedy(name))


def remedy(name: str) -> str:
    """What to send in place of this field; empty where there is nothing."""
    return f"use {REMEDIES[name]}" if name in REMEDIES else ""


@functools.cache
def _unserved(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(f.name for f in msgspec.structs.fields(kind) if f.type is Any)


def without_neutral(value: Any, kind: type[msgspec.Struct]) -> Any:
    """Decoded JSON without the object members that ask for nothing and that `kind` cannot take.

    Removes members that a struct does not know, and nulls where a struct has a default but takes no null.
    Free objects (JSON schemas, arguments of calls) stay as they are. The value itself is not changed.
    """
    return _cleaned(value, _info(kind))


@functools.cache
def _info(kind: type[msgspec.Struct]) -> mi.Type:
    return mi.type_info(kind)


def _cleaned(value: Any, info: mi.Type) -> Any:
    if isinstance(info, mi.UnionType):
        chosen = _member(value, info)
        return value if chosen is None else _cleaned(value, chosen)
    if isinstance(info, mi.ListType) and isinstance(value, list):
        return [_cleaned(item, info.item_type) for item in value]
    if isinstance(info, mi.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field for field in info.fields}
        out = {}
        for name, inner in value.items():
            if name in fields:
                if inner is not None or fields[name].required:
                    out[name] = _cleaned(inner, fields[name].type)
            elif (
                name == info.tag_field or not info.forbid_unknown_fields or not asks_for_nothing(name, inner)
            ):
                out[name] = inner
        return out
    return value


def _member(value: Any, union: mi.UnionType) -> mi.Type | None:
    """The member of a union that a list or an object belongs to."""
    if isinstance(value, list):
        return next((t for t in union.types if isinstance(t, mi.ListType)), None)
    if not isinstance(value, dict):
        return None
    structs = [t for t in union.types if isinstance(t, mi.StructType)]
    if len(structs) > 1:
        structs = [t for t in structs if t.tag_field is not None and value.get(t.tag_field) == t.tag]
    return structs[0] if structs else None
