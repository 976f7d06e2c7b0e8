"""The default model's tokenizer, rebuilt from its GGUF file, against the reference's ids."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.resolve import ModelRef
from pegainfer.app.text import TextSide, load_text
from pegainfer.frontend.detokenize import Detokenizer
from tests.support.default_model import default_model

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "tokenizer" / "smollm2.json").read_text())
MISSING_BYTES = bytes.fromhex("0406131416 1d c0c1f1f2 f5f6f7f8f9fafbfcfdfeff")


@pytest.fixture(scope="module")
def text() -> TextSide:
    return load_text(ModelRef("gguf", default_model(), "m"))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: repr(c["text"][:16]))
def test_ids_and_text_equal_the_references(text: TextSide, case: dict[str, Any]) -> None:
    tk = text.tokenizer
    assert tk.encode(case["text"]) == case["ids"]
    assert tk.encode(case["text"], parse_special=False) == case["plain_ids"]
    assert tk.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    assert tk.decode(case["ids"]) == case["decoded_without_special"]
    stream = Detokenizer(tk)
    pieces = [stream.push(i) for i in case["ids"]]
    assert "".join(pieces) + stream.flush(replace_incomplete=True) == case["decoded_without_special"]


def test_what_the_file_says_of_its_text(text: TextSide) -> None:
    tk = text.tokenizer
    assert (tk.vocab_size, tk.bos_token_id, tk.eos_token_ids) == (
        49152,
        1,
        (2, 0),
    )  # <|im_end|> and <|endoftext|>
    assert tk.special_ids == frozenset(range(17))
    assert tk.config.special_tokens["eos_token"] == "<|im_end|>"


def test_21_bytes_have_no_token(text: TextSide) -> None:
    """The reference drops them without a word, and so do we."""
    tk = text.tokenizer
    single = {tk.token_bytes(i) for i in range(tk.vocab_size) if i not in tk.special_ids}
    assert {b for b in range(256) if bytes([b]) not in single} == set(MISSING_BYTES)
    assert tk.encode("\x04\x06\x13\x14\x16\x1d") == []
    assert tk.decode(tk.encode("a\x04b")) == "ab"


def test_the_chat_template(text: TextSide) -> None:
    assert text.template is not None
    rendered = text.template.render(
        [{"role": "user", "content": "What is 2 + 2?"}], now=datetime.datetime(2026, 11, 28)
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = text.tokenizer.encode(rendered, add_special_tokens=False)
    assert ids[:3] == [1, 9690, 198] and ids[-4:] == [1, 520, 9531, 198]
