"""Options of a model's text side. Imports neither tokenizer nor template library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pegainfer.contract.errors import ConfigError


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What takes the place of a part of a model's text side.

    Args:
        tokenizer: a folder or a .gguf file whose tokenizer and template are used instead.
        chat_template: a file with the template, the name of one of the model's own, or the template itself.
        chat_template_kwargs: variables of the template where a request does not set them.
    """

    tokenizer: Path | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)


def read_variables(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """The variables of --default-chat-template-kwargs: a JSON object or a mapping. Raises ConfigError."""
    where = "default_chat_template_kwargs"
    try:
        value = json.loads(given) if isinstance(given, str) and given else given or {}
    except (ValueError, RecursionError) as e:
        raise ConfigError("not valid JSON", got=f"{e!s:.100}", where=where) from None
    if not isinstance(value, Mapping):
        raise ConfigError(
            "not variables of a template", expected='a JSON object, as {"enable_thinking": false}',
            got=type(value).__name__, where=where,
        )  # fmt: skip
    return dict(value)
