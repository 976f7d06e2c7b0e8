"""Tokenizers from a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegainfer.contract.errors import ModelFileError
from pegainfer.frontend.tokenizer_files import load_tokenizer
from tests.support.smalltokenizers import bpe_json, small_bpe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(bpe_json())
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def test_the_file_alone_is_enough(folder: Path) -> None:
    tk = load_tokenizer(folder)
    text = "the dogs sleep in 2023 <|end|> 漢字"
    assert tk.encode(text) == small_bpe().encode(text)
    assert (tk.bos_token_id, tk.eos_token_ids, tk.chat_template) == (None, (), None)


def test_settings(folder: Path) -> None:
    write(
        folder,
        "tokenizer_config.json",
        {
            "bos_token": {"content": "<|user|>", "special": True},
            "eos_token": "<|end|>",
            "pad_token": None,
            "chat_template": "T",
        },
    )
    tk = load_tokenizer(folder)
    assert tk.bos_token_id == 1
    assert tk.config.special_tokens == {"bos_token": "<|user|>", "eos_token": "<|end|>"}
    assert tk.eos_token_ids == (0,)
    assert tk.chat_template == "T"


def test_whatever_a_file_calls_the_end_ends_a_sequence(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": "<|end|>"})
    write(folder, "config.json", {"eos_token_id": 2})
    assert load_tokenizer(folder).eos_token_ids == (2, 0)
    write(folder, "generation_config.json", {"eos_token_id": [1, 2]})
    assert load_tokenizer(folder).eos_token_ids == (1, 2, 0)
    write(folder, "generation_config.json", {"eos_token_id": None})
    assert load_tokenizer(folder).eos_token_ids == (2, 0)


def test_special_tokens_of_the_map(folder: Path) -> None:
    write(folder, "special_tokens_map.json", {"eos_token": {"content": "<|end|>"}, "bos_token": "<|user|>"})
    tk = load_tokenizer(folder)
    assert (tk.eos_token_ids, tk.config.special_tokens["bos_token"]) == ((0,), "<|user|>")
    write(folder, "tokenizer_config.json", {"bos_token": "<|end|>"})
    assert load_tokenizer(folder).config.special_tokens == {"eos_token": "<|end|>", "bos_token": "<|end|>"}


def test_templates(folder: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    config = load_tokenizer(folder).config
    assert (config.chat_template, config.named_templates) == ("D", {"tool_use": "T"})
    (folder / "chat_template.jinja").write_text("J é")
    assert load_tokenizer(folder).chat_template == "J é"


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, [1, 0]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, [0]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}, [1, 0, 0]),
        ({"tokenizer_class": "LlamaTokenizerFast"}, [0]),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, [0]),
    ],
)
def test_ends_of_llama_classes(folder: Path, settings: dict[str, Any], ids: list[int]) -> None:
    """transformers' Llama classes put BOS and EOS by their settings, the others by tokenizer.json."""
    write(folder, "tokenizer_config.json", {"bos_token": "<|user|>", "eos_token": "<|end|>", **settings})
    assert load_tokenizer(folder).encode("<|end|>") == ids


def test_what_is_wrong_is_named(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"No such file.*put the model's tokenizer.json"):
        load_tokenizer(folder / "no")
    for content in ("", "{", "{}", "[1]", '{"model": 3}', bpe_json()[:-40], "[" * 10_000):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(ModelFileError, match=r"tokenizer.json cannot be read"):
            load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_broken_settings_are_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=r"not valid JSON|not a JSON object") as e:
        load_tokenizer(folder)
    assert name in str(e.value)


def test_bos_that_is_no_token(folder: Path) -> None:
    write(
        folder,
        "tokenizer_config.json",
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<none>"},
    )
    with pytest.raises(ModelFileError, match="BOS or EOS is not in the vocabulary"):
        load_tokenizer(folder)
