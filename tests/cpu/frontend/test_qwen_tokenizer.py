"""Qwen's tokenizer from a model folder, on its real vocabulary, against ids made by tiktoken."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from pegainfer.frontend.tokenizer import Tokenizer
from pegainfer.frontend.tokenizer_files import load_tokenizer
from tests.support.qwentext import real_json, write_text

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "tokenizer" / "qwen.json").read_text())
END, IM_START, IM_END = 151643, 151644, 151645


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_text(tmp_path_factory.mktemp("qwen"), real_json()))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: repr(c["text"][:16]))
def test_ids_equal_tiktokens(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]
    composed = unicodedata.normalize("NFC", case["text"])
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == composed


def test_a_text_known_from_the_models(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The capital of France is") == [785, 6722, 315, 9625, 374]


def test_ends_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 151646
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == (IM_END, END)
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert (ids[0], ids[-1]) == (IM_START, IM_END)
    assert IM_START not in tokenizer.encode("<|im_start|>", parse_special=False)
