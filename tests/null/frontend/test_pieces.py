"""A text cut at special tokens gives the ids of the whole, whatever the tokenizer's rules."""

from __future__ import annotations

import threading
from functools import cache, partial

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.frontend.pieces import MIN_CHARS, PieceCache, PieceCutter
from pegainfer.frontend.tokenizer import TextConfig, Tokenizer
from tests.support import smalltokenizers
from tests.support.smalltokenizers import CORPUS, small_bpe, small_sentencepiece

# Tokens of every kind, some of which overlap or are parts of others.
ADDED = [
    AddedToken("<|im_start|>", special=True),
    AddedToken("<|im_end|>", special=True),
    AddedToken("<|im", special=True),
    AddedToken("<tool>", special=False, normalized=False),
    AddedToken("<tool>>", special=False, normalized=False),
    AddedToken("[L]", special=True, lstrip=True),
    AddedToken("[R]", special=True, rstrip=True),
    AddedToken("[B]", special=True, lstrip=True, rstrip=True),
    AddedToken("[W]", special=True, single_word=True),
    AddedToken("word", special=False, normalized=False, single_word=True),
    AddedToken("norm", special=False, normalized=True),
    AddedToken("Norm", special=False, normalized=True, lstrip=True),
    AddedToken("\n\n", special=False, normalized=False),
    AddedToken("  ", special=False, normalized=False),
    AddedToken("é", special=False, normalized=False),
]


def trained(
    pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None
) -> tokenizers.Tokenizer:
    return smalltokenizers.trained(CORPUS * 2, 500, ADDED, pre, normalizer)


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "bpe":
        return small_bpe()
    if name == "sentencepiece":
        return small_sentencepiece()
    if name == "bytes":
        return byte_tokenizer()
    level = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
    makers = {
        "plain": lambda: trained(level(), None),
        "prefix space": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        "nfc": lambda: trained(level(), normalizers.NFC()),
        "lower": lambda: trained(
            level(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        ),
        "strip": lambda: trained(level(), normalizers.Strip()),
        "prepend": lambda: trained(level(), normalizers.Prepend("_")),
        "metaspace first": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first"), None),
        "metaspace always": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always"), None),
        "bos": lambda: with_ends(trained(level(), None)),
    }
    return Tokenizer(makers[name](), TextConfig())


def with_ends(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    first, last = (backend.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", first), ("<|im_end|>", last)],
    )
    return backend


NAMES = ["bpe", "sentencepiece", "bytes", "plain", "prefix space", "nfc", "lower", "strip", "prepend",
         "metaspace first", "metaspace always", "bos"]  # fmt: skip
FRAGMENTS = [t.content for t in ADDED] + [
    "<|end|>", "<|user|>", "<s>", "</s>", "<unk>", " ", "  ", "\n", "\t", "a", "the quick", "dogs", "1984",
    "e\u0301", "É", "e", "\u0301", "▁", "_", "<", "<|", "|>", ">", "im_start", "漢字", "😀", "x word y",
    "\u00a0",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=24).map("".join)


def valid(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_pieces_ids_are_the_wholes(name: str, data: st.DataObject) -> None:
    own = tokenizer(name)
    text = data.draw(texts.filter(valid))
    (whole,) = own.encode_batch([text], add_special_tokens=False)
    encode = partial(own.encode_batch, add_special_tokens=False)
    fresh = PieceCache(PieceCutter(list(own._added.values())))
    assert fresh.encode(text, encode) == whole
    assert fresh.encode(text, encode) == whole  # from memory
    assert own.pieces.encode(text, encode) == whole  # beside pieces of other texts


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_long_text_is_encoded_the_same_with_and_without_its_ends(name: str, special: bool) -> None:
    own = tokenizer(name)
    text = "<|im_start|>user\n The quick brown fox <|im_end|>\n [R]  x" * 12
    assert len(text) >= MIN_CHARS
    (whole,) = own.encode_batch([text], add_special_tokens=special)
    assert own.encode(text, add_special_tokens=special) == whole


def test_special_tokens_as_plain_text_are_not_cut() -> None:
    own = byte_tokenizer()
    text = "<|im_start|>" * 30
    assert own.encode(text, parse_special=False) == list(text.encode())


def test_only_what_is_new_is_encoded() -> None:
    own = byte_tokenizer()
    cache = PieceCache(PieceCutter(list(own._added.values())))
    asked: list[str] = []

    def encode(pieces: list[str]) -> list[list[int]]:
        asked.extend(pieces)
        return own.encode_batch(pieces, add_special_tokens=False)

    first = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    cache.encode(first, encode)
    assert asked == ["<|im_start|>user\nhello", "<|im_end|>\n", "<|im_start|>assistant\n"]
    asked.clear()
    cache.encode(first + "hi<|im_end|>\n<|im_start|>user\nbye", encode)
    assert asked == ["<|im_start|>assistant\nhi", "<|im_start|>user\nbye"]
    assert cache.chars == 2 * len(first) + len("hi<|im_end|>\n<|im_start|>user\nbye")
    assert cache.known_chars == len("<|im_start|>user\nhello<|im_end|>\n" + "<|im_end|>\n")


def test_the_oldest_pieces_make_room() -> None:
    own = byte_tokenizer()
    cache = PieceCache(PieceCutter(list(own._added.values())), max_bytes=20_000)
    counts: list[int] = []

    def encode(pieces: list[str]) -> list[list[int]]:
        counts.append(len(pieces))
        return own.encode_batch(pieces, add_special_tokens=False)

    for i in range(40):
        cache.encode(f"<|im_start|>{i:03}" + "x" * 100, encode)
        cache.encode("<|im_start|>kept", encode)
    assert cache._pieces.num_bytes <= 20_000
    assert counts == [1, 1] + [1] * 39  # what is used stays
    cache.encode("<|im_start|>000" + "x" * 100, encode)
    assert counts[-1] == 1 and len(counts) == 42  # what was not used for long is gone


def test_a_lower_limit_drops_what_was_used_longest_ago() -> None:
    own = byte_tokenizer()
    cache = PieceCache(PieceCutter(list(own._added.values())), max_bytes=20_000)
    encode = partial(own.encode_batch, add_special_tokens=False)
    for i in range(10):
        cache.encode(f"<|im_start|>{i:03}" + "x" * 100, encode)
    cache.limit(2000)
    assert 0 < cache._pieces.num_bytes <= 2000
    known = cache.known_chars
    cache.encode("<|im_start|>009" + "x" * 100, encode)
    assert cache.known_chars > known
    cache.encode("<|im_start|>000" + "x" * 100, encode)
    assert cache.known_chars == known + len("<|im_start|>009" + "x" * 100)


def test_a_piece_that_would_fill_the_cache_is_not_kept() -> None:
    own = byte_tokenizer()
    cache = PieceCache(PieceCutter(list(own._added.values())), max_bytes=1000)
    encode = partial(own.encode_batch, add_special_tokens=False)
    assert cache.encode("y" * 4000, encode) == [ord("y")] * 4000
    assert cache._pieces.num_bytes == 0


def test_threads_may_share_it() -> None:
    own = tokenizer("plain")
    cache = PieceCache(PieceCutter(list(own._added.values())), max_bytes=30_000)
    encode = partial(own.encode_batch, add_special_tokens=False)
    wanted = [f"<|im_start|>{'ab ' * (i % 7)}<|im_end|>{i % 13} [R] x" * 4 for i in range(60)]
    right = own.encode_batch(wanted, add_special_tokens=False)
    wrong: list[str] = []

    def work(step: int) -> None:
        for i in range(0, 600, step):
            if cache.encode(wanted[i % 60], encode) != right[i % 60]:
                wrong.append(wanted[i % 60])

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
