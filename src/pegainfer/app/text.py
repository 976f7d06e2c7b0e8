"""The text side of a model: its tokenizer and chat template. Needs neither weights nor NumPy."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.app.resolve import ModelRef
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.tokenizer import Tokenizer
from pegainfer.frontend.tokenizer_files import load_tokenizer
from pegainfer.frontend.tokenizer_gguf import tokenizer_from_gguf
from pegainfer.runtime.weights.gguf import GGUFFile


@dataclass(frozen=True)
class TextSide:
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none, and only completes text


def load_text(model: ModelRef) -> TextSide:
    """Raises ModelFileError, UnsupportedError, and ConfigError for a template that does not compile."""
    if model.kind == "folder":
        tokenizer = load_tokenizer(model.path)
    else:
        with GGUFFile(model.path) as file:
            tokenizer = tokenizer_from_gguf(file.metadata)
    source = tokenizer.chat_template
    template = None if source is None else ChatTemplate(source, tokenizer.config.special_tokens)
    return TextSide(tokenizer, template)
