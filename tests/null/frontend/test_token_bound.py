"""What a text is said to have of tokens at least, it has; whatever the tokenizer's rules."""

from __future__ import annotations

import sys
import unicodedata
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pegainfer.frontend import token_bound
from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.frontend.spelling import BYTE_OF_CHAR
from pegainfer.frontend.token_bound import NFC_MAKES_ASCII, NFC_SHRINKS, NOT_PLAIN
from pegainfer.frontend.tokenizer import TextConfig, Tokenizer
from tests.support import smalltokenizers
from tests.support.smalltokenizers import CORPUS, small_bpe, small_sentencepiece

ADDED = [
    AddedToken("<|im_start|>", special=True),
    AddedToken("<|a rather long special token, with \u212b and e\u0301|>", special=True, normalized=False),
    AddedToken("<tool>", special=False, normalized=False),
    AddedToken("word", special=False, normalized=False, single_word=True),
    AddedToken("cafe\u0301 au lait", special=False, normalized=True),
    AddedToken(" " * 24, special=False, normalized=False),
    AddedToken("é", special=False, normalized=False),
    AddedToken("Ġo", special=False, normalized=False),
]
# Hangul's syllables as letters, and words with their accents apart: NFC makes them up to 3.5 times as short.
APART = [unicodedata.normalize("NFD", text) for text in ("각난", "étonnante", "ΐᾂ", "ḱ")]
APART.append("\u1fbe\u0308\u0301")
LEVEL = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)


def trained(
    pre: pre_tokenizers.PreTokenizer | None,
    normalizer: normalizers.Normalizer | None,
    added: list[AddedToken] = ADDED,
) -> Tokenizer:
    texts = [*CORPUS, "각난" * 3, "-" * 40, " " * 30] * 3
    backend = smalltokenizers.trained(texts, 700, added, pre, normalizer)
    return Tokenizer(backend, TextConfig())


def few_bytes() -> Tokenizer:
    """Of byte-level tokens for a few letters alone: BPE drops the others."""
    vocabulary = {char: i for i, char in enumerate("abcĠ")} | {"ab": 4, "abc": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer = LEVEL()
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, TextConfig())


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "bpe":
        return small_bpe()
    if name == "sentencepiece":
        return small_sentencepiece()
    if name == "bytes":
        return byte_tokenizer()
    if name == "few bytes":
        return few_bytes()
    if name == "nfc":
        return trained(LEVEL(), normalizers.NFC())
    if name == "nfc, one word":
        return trained(LEVEL(use_regex=False), normalizers.Sequence([normalizers.NFC()]))
    if name == "prepend":
        return trained(pre_tokenizers.ByteLevel(add_prefix_space=True), normalizers.Prepend("_"))
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s+"), "merged_with_next")
    return trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(), split, LEVEL(use_regex=False)]), None)


NAMES = ["bpe", "sentencepiece", "bytes", "few bytes", "nfc", "nfc, one word", "prepend", "cuts"]
FRAGMENTS = [t.content for t in ADDED] + APART + list(CORPUS) + [
    "<|end|>", "<s>", "<unk>", "<0x0A>", " ", "\n", "-", "abc", "the", "▁", "▁the", "Ġ", "\u0301", "e", "K",
    "\u212a", "\u212b", "\u0340", "\u1fef", "漢字", "a漢\u0301", "각난", "😀", "1984", "\u00a0", "\x04",
]  # fmt: skip
texts = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=4)),
        st.integers(1, 40),
    ).map(lambda pair: pair[0] * pair[1]),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=texts, chunk=st.sampled_from([1, 2, 7, 1 << 14]), ids=st.lists(st.integers(0, 700), max_size=30))
def test_no_text_has_fewer_tokens(name: str, text: str, chunk: int, ids: list[int]) -> None:
    own = tokenizer(name)
    for given_text in (text, own.decode(ids, skip_special_tokens=False)):
        (whole,) = own.encode_batch([given_text], add_special_tokens=False)
        with mock.patch.object(token_bound, "CHUNK", chunk):
            assert own.bound.at_least(given_text, len(given_text)) <= len(whole)


@pytest.mark.parametrize("name", NAMES)
def test_of_ordinary_text_it_tells_a_good_part(name: str) -> None:
    own = tokenizer(name)
    text = "abc " * 500 if name == "few bytes" else CORPUS[0] * 20
    (whole,) = own.encode_batch([text], add_special_tokens=False)
    assert own.bound.at_least(text, len(text)) > len(whole) // 6


def test_it_is_exact_where_tokens_are_of_one_size() -> None:
    bound = byte_tokenizer().bound
    assert bound.at_least("x" * 100_000, 1 << 20) == 100_000
    assert bound.at_least("x" * 100_000, 99) == token_bound.CHUNK  # the rest is not counted
    assert bound.at_least("", 1) == 0
    assert few_bytes().bound.at_least("abc" * 1000, 5000) in (999, 1000)
    assert few_bytes().bound.at_least("xyz\n" * 1000, 5000) == 0


def doubled(words: list[str], **options: Any) -> models.BPE:
    """Tokens for all bytes, and for each word twice, four times and eight times as long."""
    vocabulary: dict[str, int] = {}
    merges: list[tuple[str, str]] = []

    def add(token: str) -> str:
        vocabulary.setdefault(token, len(vocabulary))
        return token

    for byte in range(256):
        add(f"<0x{byte:02X}>" if options else CHARS[byte])
    for word in words:
        whole = add(word[0])
        for char in word[1:]:
            merges.append((whole, add(char)))
            whole = add(whole + char)
        for _ in range(3):
            merges.append((whole, whole))
            whole = add(whole * 2)
    return models.BPE(vocabulary, merges, **options)


CHARS = {byte: char for char, byte in BYTE_OF_CHAR.items()}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("e\u0301" * 80, 10),  # an e is a token of its own, but here there are none
        ("\u1fbe\u0308\u0301" * 80, 10),
        ("K" * 80, 10),  # U+212A as an added token is looked for as K
        (("e" * 8 + "\u0301") * 10, 80),
    ],
    ids=["e with accent", "iota", "kelvin", "some accents"],
)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 14])
def test_what_nfc_joins_is_not_counted_apart(text: str, tokens: int, chunk: int) -> None:
    words = ["".join(CHARS[b] for b in char.encode()) for char in "éΐ"]
    backend = tokenizers.Tokenizer(doubled(words))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = LEVEL(use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("\u212a" * 8, normalized=True)])
    own = Tokenizer(backend, TextConfig())
    (whole,) = own.encode_batch([text], add_special_tokens=False)
    assert len(whole) == tokens
    with mock.patch.object(token_bound, "CHUNK", chunk):
        assert own.bound.at_least(text, 1000) <= tokens


@pytest.mark.parametrize("text", [" " * 80, "▁" * 80, " ▁" * 40], ids=["spaces", "marks", "both"])
def test_spaces_with_a_mark_are_not_counted(text: str) -> None:
    backend = tokenizers.Tokenizer(doubled(["▁"], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    own = Tokenizer(backend, TextConfig())
    (whole,) = own.encode_batch([text], add_special_tokens=False)
    assert (len(whole), own.bound.at_least(text, 1000)) == (10, 0)
    assert own.bound.at_least("z" * 500, 1000) == 500


STRIPPING = [AddedToken("[M]", special=True, lstrip=True)]


@pytest.mark.parametrize(
    "own",
    [
        trained(LEVEL(), normalizers.Strip()),
        trained(LEVEL(), normalizers.NFKC()),
        trained(LEVEL(), normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
        trained(LEVEL(), normalizers.Replace("a", "")),
        trained(LEVEL(), normalizers.Replace(" ", "▁")),
        trained(pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), LEVEL()]), None),
        trained(pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), LEVEL()]), None),
        trained(None, None),
        trained(LEVEL(), None, STRIPPING),
    ],
    ids=[
        "strip",
        "nfkc",
        "lowercase",
        "deletes",
        "marks",
        "no spaces",
        "spaces cut out",
        "no bytes",
        "lstrip",
    ],
)
def test_rules_of_other_kinds_have_no_bound(own: Tokenizer) -> None:
    assert own.bound.at_least("the quick brown fox" * 1000, 1 << 20) == 0


@pytest.mark.parametrize("lacks", ["byte_fallback", "a byte"])
def test_sentencepiece_without_every_byte_has_no_bound(lacks: str) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256 - (lacks == "a byte"))} | {"<unk>": 256}
    model = models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=lacks == "a byte")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert Tokenizer(backend, TextConfig()).bound.at_least("x" * 1000, 2000) == 0


def test_nfc_makes_no_text_more_than_four_times_as_short() -> None:
    """By weights of what characters are made of: no character weighs less than its size, none that a text is
    composed to more than four times its size. And what is taken to stay as it is does.
    """
    parts: dict[str, str] = {}
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        apart = unicodedata.normalize("NFD", char)
        if apart != char:
            parts[char] = apart
    weight: dict[str, int] = {}
    for char, apart in parts.items():
        if len(apart) == 1:
            weight[apart] = max(weight.get(apart, 0), size(char))
    assert (weight["K"], weight["ι"]) == (3, 3)

    def weight_of(text: str) -> int:
        return sum(max(size(part), weight.get(part, 0)) for part in text)

    assert all(size(char) <= weight_of(apart) for char, apart in parts.items())
    composed = [char for char in parts if unicodedata.normalize("NFC", char) == char]
    assert len(composed) > 11_172  # Hangul's and others
    for char in [*composed, *weight]:
        assert weight_of(parts.get(char, char)) <= NFC_SHRINKS * size(char), char

    # What is plain is never changed: ASCII joins what follows it alone, Chinese characters nothing.
    plain = {chr(code) for code in (*range(0x80), *range(0x4E00, 0xA000))}
    assert NOT_PLAIN.sub("", "".join(sorted(plain)) + "a") == "".join(sorted(plain))
    assert not plain & parts.keys()
    for char in composed:
        assert not plain & set(parts[char][1:])
        assert parts[char][0].isascii() or parts[char][0] not in plain
    assert {c for char in parts for c in unicodedata.normalize("NFC", char) if c.isascii()} == set(
        NFC_MAKES_ASCII
    )
    assert not any(unicodedata.combining(char) for char in plain)


def size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
