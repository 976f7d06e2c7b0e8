"""The text side of a model: its tokenizer and chat template. Needs neither weights nor NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.resolve import ModelRef
from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.tokenizer import Tokenizer
from pegainfer.frontend.tokenizer_files import load_tokenizer, read_json
from pegainfer.frontend.tokenizer_gguf import tokenizer_from_gguf
from pegainfer.runtime.weights.gguf import GGUFFile


@dataclass(frozen=True)
class TextSide:
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none, and only completes text
    generation: Mapping[str, Any] = field(default_factory=dict)  # what the model says of sampling, as it is


def load_text(
    model: ModelRef, *, tokenizer: Path | None = None, chat_template: Path | None = None
) -> TextSide:
    """The tokenizer, the template and the sampling defaults of a model.

    Args:
        tokenizer: a folder or a .gguf file that takes the place of the model's own tokenizer and template.
        chat_template: a file with the template that takes the place of the one that is found.

    Raises ModelFileError, UnsupportedError, and ConfigError for a template that does not compile.
    """
    if tokenizer is not None:
        other = ModelRef("gguf" if tokenizer.suffix.lower() == ".gguf" else "folder", tokenizer, model.name)
        side = load_text(other, chat_template=chat_template)
        return dataclasses.replace(side, generation=_generation(model))
    if model.kind == "folder":
        found = load_tokenizer(model.path)
    else:
        with GGUFFile(model.path) as file:
            found = tokenizer_from_gguf(file.metadata)
    source, tool_source = found.chat_template, found.config.named_templates.get("tool_use")
    if chat_template is not None:
        source, tool_source = _read(chat_template), None
    special = found.config.special_tokens
    template = None if source is None else ChatTemplate(source, special, tool_source=tool_source)
    return TextSide(found, template, _generation(model))


def _generation(model: ModelRef) -> Mapping[str, Any]:
    """What a model says of sampling, as it is."""
    if model.kind == "folder":
        return read_json(model.path / "generation_config.json")
    with GGUFFile(model.path) as file:
        generation = {k: v for k, v in file.metadata.items() if k.startswith("general.sampling.")}
    if not generation and model.path.name == DEFAULT_MODEL.file_name:
        return dict(DEFAULT_MODEL.generation)
    return generation


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            "cannot read the chat template", expected="a Jinja file in UTF-8", got=f"{e!s:.200}",
            where="--chat-template",
        ) from None  # fmt: skip
