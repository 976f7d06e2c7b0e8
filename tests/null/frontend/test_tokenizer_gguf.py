"""Tokenizers rebuilt from GGUF metadata: equal to their references, and clear about what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.frontend.pre_tokenizers import PRE_TOKENIZERS
from pegainfer.frontend.spelling import BYTE_OF_CHAR
from pegainfer.frontend.tokenizer_gguf import tokenizer_from_gguf
from tests.support.smalltokenizers import (
    SPECIAL,
    bpe_json,
    bpe_metadata,
    sentencepiece_data,
    sentencepiece_metadata,
    small_bpe,
    small_sentencepiece,
)

REFERENCE = tokenizers.Tokenizer.from_str(bpe_json())
PLAIN_REFERENCE = tokenizers.Tokenizer.from_str(bpe_json())
PLAIN_REFERENCE.encode_special_tokens = True
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
PIECES = st.lists(UNICODE | st.sampled_from([*SPECIAL, "the", " dog", "123", "\n", "<|"])).map("".join)


@given(PIECES)
def test_bpe_equals_the_tokenizer_json(text: str) -> None:
    assert small_bpe().encode(text) == REFERENCE.encode(text).ids
    assert small_bpe().encode(text, parse_special=False) == PLAIN_REFERENCE.encode(text).ids


@pytest.mark.parametrize("case", sentencepiece_data()["cases"], ids=lambda c: repr(c["text"][:12]))
def test_sentencepiece_equals_the_reference(case: dict[str, Any]) -> None:
    tk = small_sentencepiece()
    ids = tk.encode(case["text"], add_special_tokens=False, parse_special=False)
    assert ids == case["ids"]
    assert tk.decode(ids) == case["decoded"]


# Words as the models' own tokenizer.json (smollm, qwen2, deepseek-v3) or regular expression (llama-bpe,
# gpt-2) cuts them. Checked with tokenizers 0.23.3 and regex.
WORDS = [
    ("gpt-2", "Hello world's  test\n\n x", ["Hello", " world", "'s", " ", " test", "\n\n", " x"]),
    ("gpt-2", "I'LL don’t 12345", ["I", "'", "LL", " don", "’", "t", " 12345"]),
    ("gpt-2", "  a\t\tb \r\n c", [" ", " a", "\t", "\t", "b", " \r\n", " c"]),
    ("smollm", "I'LL 123 ①Ⅳ", ["I", "'", "LL", " ", "1", "2", "3", " ", "①", "Ⅳ"]),
    ("smollm", "x_1;\n\t}", ["x", "_", "1", ";", "\n", "\t", "}"]),
    ("smollm", "\x00\x1f \u3000 \u200b", ["\x00\x1f", " \u3000", " \u200b"]),
    ("llama-bpe", "I'LL don’t 12345 3.14", ["I", "'LL", " don", "’t", " ", "123", "45", " ", "3", ".", "14"]),
    ("llama-bpe", "  a\t\tb \r\n c", [" ", " a", "\t", "\tb", " \r\n", " c"]),
    ("llama-bpe", "foo(bar)=>x_1;\n\t}", ["foo", "(bar", ")=>", "x", "_", "1", ";\n", "\t", "}"]),
    ("qwen2", "你好世界 1234 ①Ⅳ", ["你好世界", " ", "1", "2", "3", "4", " ", "①", "Ⅳ"]),
    # A mark that no letter takes up belongs to the word: of Devanagari, vowel signs and the virama.
    ("qwen35", "हिन्दी 12 don't\n", ["हिन्दी", " ", "1", "2", " don", "'t", "\n"]),
    ("qwen2", "foo(bar)=>x_1;\n", ["foo", "(bar", ")=>", "x", "_", "1", ";\n"]),
    ("deepseek-v3", "don’t 12345", ["don", "’", "t", " ", "123", "45"]),
    ("deepseek-v3", "ひらがなカタカナ한국어", ["ひらがなカタカナ", "한국어"]),
    ("deepseek-v3", "foo(bar)=>x", ["foo", "(bar", ")=>", "x"]),
    ("deepseek-llm", "I'm 12x\t你好 ok", ["I", "'", "m", " ", "1", "2", "x", "\t", "你好", " ok"]),
    ("deepseek-llm", "a\r\n\n  b  ", ["a", "\r", "\n", "\n", " ", " b", "  "]),
    # Its range of ASCII punctuation has the letters in it, which so part from others.
    ("deepseek-llm", "Ωmega, don’t", ["Ω", "mega", ",", " don", "’", "t"]),
    ("deepseek-llm", "ひらがな。x", ["ひらがな", "。", "x"]),
    ("deepseek-coder", "foo_bar(1)\n", ["foo", "_", "bar", "(", "1", ")", "\n"]),
    ("kimi-k2", "中文English混合", ["中文", "English", "混合"]),
    ("kimi-k2", "1234567890", ["123", "456", "789", "0"]),
    ("kimi-k2", "Hello, worldWide HTTPServer I'll", ["Hello", ",", " world", "Wide", " HTTPServer", " I'll"]),
    ("kimi-k2", " 你好ab_c\n\n  x", [" ", "你好", "ab", "_c", "\n\n", " ", " x"]),
    ("default", "a, b 12345", ["a", ",", " b", " ", "123", "45"]),
]


@pytest.mark.parametrize(("name", "text", "words"), WORDS)
def test_words(name: str, text: str, words: list[str]) -> None:
    pieces = PRE_TOKENIZERS[name].split().pre_tokenize_str(text)
    assert [bytes(BYTE_OF_CHAR[c] for c in piece).decode() for piece, _ in pieces] == words


def tiny(**changes: Any) -> dict[str, Any]:
    """Bytes a, b, c, é's two bytes, and merges of some; a key set to None is left out."""
    tokens = ["a", "b", "c", "Ã", "©", "ab", "abc", "<eos>", "<bos>", "<x>"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array([1] * 7 + [3, 3, 4], np.int32),
        "merges": ["a b", "ab c"],
        "bos_token_id": 8,
        "eos_token_id": 7,
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}


def test_bos_and_eos_as_the_file_says() -> None:
    assert tokenizer_from_gguf(tiny()).encode("abc") == [6]
    assert tokenizer_from_gguf(tiny(add_bos_token=True)).encode("abc") == [8, 6]
    both = tokenizer_from_gguf(tiny(add_bos_token=True, add_eos_token=True))
    assert both.encode("abc") == [8, 6, 7]
    assert both.encode("abc", add_special_tokens=False) == [6]
    assert both.encode("abc", parse_special=False) == [8, 6, 7]
    assert tokenizer_from_gguf(tiny(pre="llama-bpe")).encode("abc") == [8, 6], "Llama 3 puts BOS by default"
    assert tokenizer_from_gguf(tiny(pre="llama-bpe", add_bos_token=False)).encode("abc") == [6]
    sp = sentencepiece_metadata()
    assert tokenizer_from_gguf(sp | {"tokenizer.ggml.add_bos_token": False}).encode("")[:1] == []


def test_space_prefix_can_be_off() -> None:
    tk = tokenizer_from_gguf(sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False})
    ids = tk.encode("the dog", add_special_tokens=False)
    assert tk.token_string(ids[0]) != "▁the"
    assert tk.decode(ids) == "the dog" and not tk.strips_leading_space
    assert tk.decode(tk.encode(" the", add_special_tokens=False)) == " the"


def test_words_that_are_tokens_need_no_merges_in_llama3() -> None:
    without = tiny(merges=["a b"])
    assert tokenizer_from_gguf(without).encode("abc") == [5, 2]
    without["tokenizer.ggml.pre"] = "llama-bpe"
    assert tokenizer_from_gguf(without).encode("abc", add_special_tokens=False) == [6]


def test_qwen_composes_characters() -> None:
    assert tokenizer_from_gguf(tiny(pre="qwen2")).encode("e\u0301") == [3, 4]
    assert tokenizer_from_gguf(tiny()).encode("é") == [3, 4]


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    tk = tokenizer_from_gguf(tiny())
    assert tk.encode("a<x>b") == [0, 9, 1]
    assert tk.special_ids == {7, 8}
    assert tk.decode([0, 9, 7]) == "a<x>"


def test_bytes_without_a_token_are_dropped() -> None:
    """As the reference does: SmolLM2's vocabulary lacks 21 bytes."""
    assert tokenizer_from_gguf(tiny()).encode("zaz") == [0]


def test_text_config() -> None:
    tokens = tiny()["tokenizer.ggml.tokens"] + ["<|eot_id|>", "<|im_end|>"]
    types = np.array([1] * 7 + [3, 3, 4, 3, 1], np.int32)
    metadata = tiny(tokens=tokens, token_type=types, padding_token_id=7, unknown_token_id=0)
    config = tokenizer_from_gguf(metadata | {"tokenizer.chat_template": "{{ x }}"}).config
    assert config.bos_token_id == 8
    assert config.eos_token_ids == (7, 10), "a control token that ends turns counts; a normal one does not"
    assert config.special_tokens == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "a",
        "pad_token": "<eos>",
    }
    assert config.chat_template == "{{ x }}"
    plain = tokenizer_from_gguf(tiny(bos_token_id=None, eos_token_id=None, token_type=None)).config
    assert (plain.bos_token_id, plain.eos_token_ids, plain.chat_template) == (None, (), None)
    assert tokenizer_from_gguf(metadata | {"tokenizer.ggml.eot_token_id": 9}).eos_token_ids == (7, 9, 10)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"model": "bert"}, UnsupportedError, "expected tokenizer.ggml.model gpt2 or llama; got bert"),
        ({"model": None}, UnsupportedError, "tokenizer model is not supported"),
        (
            {"pre": "falcon"},
            UnsupportedError,
            "pre-tokenizer is not supported; expected .*smollm.*; got falcon",
        ),
        ({"pre": None}, UnsupportedError, "pre-tokenizer is not supported"),
        ({"pre": ["x"]}, UnsupportedError, "pre-tokenizer is not supported"),
        ({"tokens": None}, ModelFileError, "tokenizer.ggml.tokens is missing"),
        ({"tokens": "abc"}, ModelFileError, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, ModelFileError, "tokenizer.ggml.merges is missing"),
        ({"tokens": ["a", "a"]}, ModelFileError, "holds a token twice; expected 2; got 1"),
        (
            {"token_type": [1]},
            ModelFileError,
            "token_type has another length than tokens; expected 10; got 1",
        ),
        ({"merges": ["a b", "a z"]}, ModelFileError, "vocabulary and merges do not fit; .* got 'a z'"),
        ({"merges": ["a b c"]}, ModelFileError, "do not fit; .* got 'a b c'"),
        ({"merges": ["ab"]}, ModelFileError, "do not fit; .* got 'ab'"),
        ({"merges": ["b c"]}, ModelFileError, "do not fit; .* got 'b c'"),
        ({"bos_token_id": 10}, ModelFileError, "bos_token_id is no token; expected < 10; got 10"),
        ({"eos_token_id": -1}, ModelFileError, "eos_token_id is no token"),
        ({"eos_token_id": "7"}, ModelFileError, "eos_token_id is no token"),
        ({"eot_token_id": 1 << 40}, ModelFileError, "eot_token_id is no token"),
        ({"model": "llama"}, ModelFileError, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [0.0]}, ModelFileError, "scores has another length than tokens"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tokenizer_from_gguf(tiny(**changes))


def test_the_small_metadata_is_that_of_the_json() -> None:
    assert bpe_metadata()["tokenizer.ggml.tokens"][:3] == list(SPECIAL)
    assert len(bpe_metadata()["tokenizer.ggml.tokens"]) == REFERENCE.get_vocab_size()


@pytest.mark.parametrize("role", ["padding", "unknown"])
@pytest.mark.parametrize("value", [10, 2**32 - 1, -1])
def test_a_bad_id_of_a_role_that_nothing_uses_is_a_warning(
    role: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = tokenizer_from_gguf(tiny(**{f"{role}_token_id": value})).config
    assert {"padding": "pad_token", "unknown": "unk_token"}[role] not in config.special_tokens
    assert f"tokenizer.ggml.{role}_token_id is no token" in caplog.text


def test_a_texts_end_beside_the_turns_end() -> None:
    metadata = tiny()
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|endoftext|>", "<|im_end|>", "</s>"]
    types = [*metadata["tokenizer.ggml.token_type"], 3, 3, 1]
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    n = len(tokens)
    assert set(tokenizer_from_gguf(metadata | more).eos_token_ids) == {7, n - 3, n - 2}
