"""The text side of a model: its tokenizer and chat template. Needs neither weights nor NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


def load_text(model: ModelRef) -> TextSide:
    """Raises ModelFileError, UnsupportedError, and ConfigError for a template that does not compile."""
    if model.kind == "folder":
        tokenizer = load_tokenizer(model.path)
        generation = read_json(model.path / "generation_config.json")
    else:
        with GGUFFile(model.path) as file:
            tokenizer = tokenizer_from_gguf(file.metadata)
            generation = {k: v for k, v in file.metadata.items() if k.startswith("general.sampling.")}
    source = tokenizer.chat_template
    template = None if source is None else ChatTemplate(source, tokenizer.config.special_tokens)
    return TextSide(tokenizer, template, generation)
