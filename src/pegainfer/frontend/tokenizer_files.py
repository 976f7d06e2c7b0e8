"""A tokenizer from a model folder in Hugging Face's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from pegainfer.contract.errors import ModelFileError
from pegainfer.frontend.tokenizer import TextConfig, Tokenizer
from pegainfer.frontend.tokenizer_tiktoken import tiktoken_backend
from pegainfer.frontend.vocabulary_files import RANKS

MAX_JSON_BYTES = 16 << 20  # of the small files; tokenizer.json itself is bounded by MAX_TOKENIZER_BYTES
MAX_TOKENIZER_BYTES = 256 << 20
# Classes of transformers that put BOS and EOS by these two settings instead of by tokenizer.json.
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads tokenizer.json, else tiktoken.model, and where present tokenizer_config.json,
    special_tokens_map.json, chat_template.jinja, additional_chat_templates, generation_config.json and
    config.json.

    Raises ModelFileError, UnsupportedError.
    """
    folder = Path(folder)
    settings = read_json(folder / "tokenizer_config.json")
    backend = _backend(folder, settings)
    special = {**_special_tokens(read_json(folder / "special_tokens_map.json")), **_special_tokens(settings)}
    _apply_llama_settings(backend, settings, special)
    template, named = _templates(folder, settings)
    config = TextConfig(
        bos_token_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        eos_token_ids=_eos_ids(folder, backend, settings),
        special_tokens=special,
        chat_template=template,
        named_templates=named,
    )
    return Tokenizer(backend, config)


def _backend(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists() and (folder / RANKS).exists():
        return tiktoken_backend(folder, settings)
    _check(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises Exception itself
        raise ModelFileError("tokenizer.json cannot be read", got=f"{e!s:.200}", where=path) from None


def _check(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as e:
        raise ModelFileError(
            f"cannot read tokenizer: {e.strerror}",
            where=path,
            remedy="put the model's tokenizer.json beside its weights",
        ) from None
    if size > MAX_TOKENIZER_BYTES:
        raise ModelFileError(
            "tokenizer.json is too large", expected=f"≤ {MAX_TOKENIZER_BYTES} bytes", got=size, where=path
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; empty where there is no such file. Raises ModelFileError."""
    value = _read(path, {})
    if not isinstance(value, dict):
        raise ModelFileError("not a JSON object", got=type(value).__name__, where=path)
    return value


def read_json_list(path: Path) -> list[Any]:
    """The array in a small JSON file; empty where there is no such file. Raises ModelFileError."""
    value = _read(path, [])
    if not isinstance(value, list):
        raise ModelFileError("not a JSON array", got=type(value).__name__, where=path)
    return value


def _read(path: Path, missing: Any) -> Any:
    """The value in a JSON file; `missing` where there is no such file."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelFileError(
                "file is too large", expected=f"≤ {MAX_JSON_BYTES} bytes", got=size, where=path
            )
        data = path.read_bytes()
    except FileNotFoundError:
        return missing
    except OSError as e:
        raise ModelFileError(f"cannot read file: {e.strerror}", where=path) from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ModelFileError("not valid JSON", got=f"{e!s:.200}", where=path) from None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """'bos_token' and its like; each is a string or an object with `content`."""
    found: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = settings.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _apply_llama_settings(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    if settings.get("tokenizer_class") not in _LLAMA_CLASSES:
        return
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    add_ends(
        backend,
        special.get("bos_token") if settings.get("add_bos_token", True) else None,
        special.get("eos_token") if settings.get("add_eos_token", False) else None,
    )


def add_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes `encode` with special tokens put these two around a text. Raises ModelFileError."""
    ends = [t for t in (bos, eos) if t is not None]
    pairs = [(t, backend.token_to_id(t)) for t in ends]
    if any(i is None for _, i in pairs):
        raise ModelFileError("BOS or EOS is not in the vocabulary", got=ends)
    single = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=pairs
    )


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """All that a file calls the end of a sequence: fine-tunes often change one file and leave the others.

    The order is that of generation_config.json, config.json, tokenizer_config.json, special_tokens_map.json.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids: list[Any] = value if isinstance(value, list) else [value]
        if all(type(i) is int and i >= 0 for i in ids):
            found += ids
    for tokens in (settings, read_json(folder / "special_tokens_map.json")):
        own = backend.token_to_id(_special_tokens(tokens).get("eos_token", ""))
        found += [] if own is None else [own]
    return tuple(dict.fromkeys(found))


def _templates(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The default chat template and all that are named. A chat_template.jinja overrides the settings."""
    named: dict[str, str] = {}
    value = settings.get("chat_template")
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and isinstance(item.get("name"), str):
                named[item["name"]] = str(item.get("template", ""))
    elif isinstance(value, str):
        named["default"] = value
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        if path.is_file():
            try:
                named[name] = path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as e:
                raise ModelFileError("cannot read chat template", got=f"{e!s:.200}", where=path) from None
    return named.pop("default", None), named
