"""The text side of a model: its tokenizer and chat template. Needs neither weights nor NumPy."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pegainfer.app.cache import DEFAULT_MODEL
from pegainfer.app.pooling_files import folder_pooling, gguf_pooling
from pegainfer.app.resolve import ModelRef
from pegainfer.app.text_options import TextOptions
from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.own_pooling import OwnPooling
from pegainfer.frontend.tokenizer import Tokenizer
from pegainfer.frontend.tokenizer_files import load_tokenizer, read_json
from pegainfer.frontend.tokenizer_gguf import tokenizer_from_gguf
from pegainfer.runtime.weights.gguf_split import open_gguf


class TextSide(msgspec.Struct, frozen=True):
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none, and only completes text
    generation: Mapping[str, Any] = {}  # what the model says of sampling, as it is
    pooling: OwnPooling = msgspec.field(default_factory=OwnPooling)  # what it says of embeddings and scores


def load_text(model: ModelRef, options: TextOptions | None = None) -> TextSide:
    """The tokenizer, the template and the sampling defaults of a model.

    Raises ModelFileError, UnsupportedError, and ConfigError for a template that is not there or does not
    compile.
    """
    options = options or TextOptions()
    # A GGUF file is opened only once: it takes 10 ms to skip the vocabulary in its metadata.
    own = contextlib.nullcontext() if model.kind == "folder" else open_gguf(model.path)
    with own as file:
        metadata = {} if file is None else file.metadata
        if options.tokenizer is not None or file is None:
            found = _tokenizer(options.tokenizer or model.path)
        else:
            found = tokenizer_from_gguf(metadata)
        template = make_template(found, options)
        return TextSide(found, template, _generation(model, metadata), _pooling(model, metadata))


def _tokenizer(path: Path) -> Tokenizer:
    """Of a folder or a .gguf file."""
    if path.suffix.lower() != ".gguf":
        return load_tokenizer(path)
    with open_gguf(path) as file:
        return tokenizer_from_gguf(file.metadata)


def make_template(tokenizer: Tokenizer, options: TextOptions) -> ChatTemplate | None:
    """The template that chats are rendered with; None where there is none. Raises ConfigError."""
    named = tokenizer.config.named_templates
    source, tool_source = tokenizer.chat_template, named.get("tool_use")
    if options.chat_template is not None:
        source, tool_source = read_template(options.chat_template, named), None
    if source is None:
        return None
    return ChatTemplate(
        source, tokenizer.config.special_tokens, tool_source=tool_source,
        defaults=options.chat_template_kwargs,
    )  # fmt: skip


def read_template(reference: str, named: Mapping[str, str]) -> str:
    """The text of a chat template.

    Args:
        reference: a file, a key of `named`, or the template itself, which holds {{ or {%.
        named: the model's own templates by name.

    Raises ConfigError where there is none.
    """
    if "{{" in reference or "{%" in reference:
        return reference
    if reference in named:
        return named[reference]
    try:
        return Path(reference).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        names = f", or the name of one of the model's templates ({', '.join(named)})" if named else ""
        raise ConfigError(
            "cannot read the chat template", expected=f"a Jinja file in UTF-8{names}", got=f"{e!s:.200}",
            where="chat_template",
        ) from None  # fmt: skip


def _generation(model: ModelRef, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a model says of sampling, as it is. `metadata`: of its GGUF file."""
    if model.kind == "folder":
        return read_json(model.path / "generation_config.json")
    generation = {k: v for k, v in metadata.items() if k.startswith("general.sampling.")}
    if not generation and model.path.name == DEFAULT_MODEL.file_name:
        return dict(DEFAULT_MODEL.generation)
    return generation


def _pooling(model: ModelRef, metadata: Mapping[str, Any]) -> OwnPooling:
    """What a model's files say of embeddings and scores. `metadata`: of its GGUF file."""
    if model.kind == "folder":
        return folder_pooling(model.path, model.name)
    return gguf_pooling(metadata, model.name)
