"""Tokenizers from a list of ranks: equal to merging pairs by the rank of what they make."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from pegainfer.app.known_ids import known_ids
from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.frontend.pre_tokenizers import PRE_TOKENIZERS
from pegainfer.frontend.spelling import BYTE_OF_CHAR
from pegainfer.frontend.tokenizer_files import load_tokenizer
from tests.support.smalltokenizers import CORPUS

KIMI = PRE_TOKENIZERS["kimi-k2"]
CODE = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}


@cache
def ranks() -> tuple[bytes, ...]:
    """The single bytes in a shuffled order, then tokens in the order in which training made them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = KIMI.split()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    vocab = backend.get_vocab(with_added_tokens=False)
    made = [bytes(BYTE_OF_CHAR[c] for c in t) for t in sorted(vocab, key=vocab.__getitem__)]
    singles = [bytes([i * 37 % 256]) for i in range(256)]
    return tuple(singles + [token for token in made if len(token) > 1])


def write(folder: Path, lines: list[bytes], **settings: Any) -> Path:
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(CODE | settings))
    return folder


def whole() -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % i for i, token in enumerate(ranks())]


def merged(word: bytes) -> list[int]:
    """A word's ids by the rule itself: the pair that makes the token of the lowest rank is joined first."""
    ids = {token: i for i, token in enumerate(ranks())}
    if word in ids:
        return [ids[word]]
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        pairs = [(ids.get(parts[i] + parts[i + 1], len(ids)), i) for i in range(len(parts) - 1)]
        rank, at = min(pairs, default=(len(ids), 0))
        if rank == len(ids):
            return [ids[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    first = len(ranks())
    named = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 1): {"content": "[EOS]", "special": True},
        str(first + 2): {"content": "<|tool_call_begin|>", "special": False},
    }
    made = tmp_path_factory.mktemp("kimi")
    return write(made, whole(), added_tokens_decoder=named, bos_token="[BOS]", eos_token="[EOS]")


@given(st.lists(st.sampled_from(["the ", "dogs", "中文", "漢字", "été", "12345", "\n", "x"]) | st.text()))
def test_words_are_merged_by_rank(folder: Path, fragments: list[str]) -> None:
    text = "".join(fragments).encode(errors="ignore").decode()
    words = KIMI.split().pre_tokenize_str(text)
    wanted = [i for word, _ in words for i in merged(bytes(BYTE_OF_CHAR[c] for c in word))]
    found = tokenizer(folder).encode(text, parse_special=False)
    assert found == wanted
    assert tokenizer(folder).decode(found) == text


@cache
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


def test_special_tokens_follow_the_ranks(folder: Path) -> None:
    tk, first = tokenizer(folder), len(ranks())
    assert (tk.bos_token_id, tk.eos_token_ids) == (first, (first + 1,))
    assert tk.encode("[BOS]<|tool_call_begin|>") == [first, first + 2]
    assert first in tk.special_ids and first + 2 not in tk.special_ids
    assert tk.token_id(f"<|reserved_token_{first + 255}|>") == first + 255
    assert tk.vocab_size == known_ids(folder) == first + 256


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda lines: lines[1:], "line 1 of a list of ranks; expected a new token in base64, then 0"),
        (lambda lines: [*lines[:9], b"!! 9", *lines[10:]], "line 10 of a list"),
        (lambda lines: [*lines, lines[3].split()[0] + b" %d" % len(lines)], "of a list of ranks"),
        (lambda lines: lines[:200], r"lacks single bytes; got \[\d+, \d+"),
    ],
    ids=["other order", "no base64", "twice", "short"],
)
def test_a_damaged_list(change: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=match):
        load_tokenizer(write(tmp_path, change(whole())))


def test_a_name_that_two_special_tokens_have(tmp_path: Path) -> None:
    first = len(ranks())
    named = {str(first): {"content": "<x>"}, str(first + 1): {"content": "<x>"}}
    with pytest.raises(ModelFileError, match="a special token is named twice; got '<x>', id"):
        load_tokenizer(write(tmp_path, whole(), added_tokens_decoder=named))


def test_other_models_cut_words_in_other_ways(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tiktoken.model of this model.*use a folder with tokenizer"):
        load_tokenizer(write(tmp_path, whole(), auto_map=None))
