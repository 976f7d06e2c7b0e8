"""The text side of a model: its tokenizer and chat template. Needs neither weights nor NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pegainfer.app.resolve import ModelRef
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


def load_text(model: ModelRef, *, tokenizer: Path | None = None) -> TextSide:
    """The text side of a model.

    Args:
        tokenizer: a folder or a .gguf file that takes the place of the model's own tokenizer and template.

    Raises ModelFileError, UnsupportedError, and ConfigError for a template that does not compile.
    """
    if tokenizer is not None:
        other = ModelRef("gguf" if tokenizer.suffix.lower() == ".gguf" else "folder", tokenizer, model.name)
        return dataclasses.replace(load_text(other), generation=_generation(model))
    if model.kind == "folder":
        found = load_tokenizer(model.path)
    else:
        with GGUFFile(model.path) as file:
            found = tokenizer_from_gguf(file.metadata)
    source = found.chat_template
    template = None if source is None else ChatTemplate(source, found.config.special_tokens)
    return TextSide(found, template, _generation(model))


def _generation(model: ModelRef) -> Mapping[str, Any]:
    """What a model says of sampling, as it is."""
    if model.kind == "folder":
        return read_json(model.path / "generation_config.json")
    with GGUFFile(model.path) as file:
        return {k: v for k, v in file.metadata.items() if k.startswith("general.sampling.")}
