"""The tokenizer's own rules: decoding by bytes, special tokens, and errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from pegainfer.contract.errors import RequestError, UnsupportedError
from pegainfer.frontend.spelling import BYTE_OF_CHAR
from pegainfer.frontend.tokenizer import TextConfig, Tokenizer
from tests.support.smalltokenizers import (
    SPECIAL,
    bpe_json,
    sentencepiece_data,
    small_bpe,
    small_sentencepiece,
)

REFERENCE = tokenizers.Tokenizer.from_str(bpe_json())
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
PIECES = st.lists(UNICODE | st.sampled_from(SPECIAL)).map("".join)
# Some beyond the vocabulary; but not id 2, which the library decodes wrongly.
IDS = st.lists(st.integers(0, 620).filter(lambda i: i != 2))


def test_alphabet_names_every_byte_once() -> None:
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert (BYTE_OF_CHAR["a"], BYTE_OF_CHAR["Ġ"], BYTE_OF_CHAR["Ċ"], BYTE_OF_CHAR["ÿ"]) == (97, 32, 10, 255)


@given(PIECES)
def test_text_comes_back(text: str) -> None:
    tk = small_bpe()
    assert tk.decode(tk.encode(text), skip_special_tokens=False) == text
    assert tk.decode(tk.encode(text, parse_special=False)) == text


@given(IDS, st.booleans())
def test_decodes_any_ids_as_the_library_does(ids: list[int], skip: bool) -> None:
    assert small_bpe().decode(ids, skip_special_tokens=skip) == REFERENCE.decode(
        ids, skip_special_tokens=skip
    )


@given(UNICODE)
def test_sentencepiece_text_comes_back(text: str) -> None:
    tk = small_sentencepiece()
    plain = text.replace("▁", " ")  # the mark stands for a space: SentencePiece cannot tell them apart
    assert tk.decode(tk.encode(text, parse_special=False)) == plain


@settings(max_examples=300)
@given(st.lists(st.integers(0, 479)), st.booleans())
def test_sentencepiece_decodes_as_the_library_where_bytes_are_utf8(ids: list[int], skip: bool) -> None:
    """Elsewhere the library turns each byte of a run into U+FFFD, which no stream could know in time."""
    tk = small_sentencepiece()
    text = tk.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in text:
        assert text == tk._backend.decode(ids, skip_special_tokens=skip)


def test_special_tokens_in_text() -> None:
    tk = small_bpe()
    assert tk.special_ids == {0, 1, 2}
    assert tk.encode("<|user|><|end|><|é|>") == [1, 0, 2]
    plain = tk.encode("<|user|>", parse_special=False)
    assert 1 not in plain and tk.decode(plain) == "<|user|>"
    assert tk.decode([1, *tk.encode("x"), 0]) == "x"
    assert tk.decode([1, *tk.encode("x"), 0], skip_special_tokens=False) == "<|user|>x<|end|>"


def test_sentencepiece_special_tokens_are_never_made_from_text() -> None:
    tk = small_sentencepiece()
    bos, eos = sentencepiece_data()["bos_id"], sentencepiece_data()["eos_id"]
    assert tk.encode("<s>a</s>")[:2] == [bos, bos]
    plain = tk.encode("<s>a</s>", parse_special=False)
    assert plain[0] == bos and not {bos, eos} & set(plain[1:])
    assert tk.encode("", add_special_tokens=True) == [bos]
    assert tk.encode("", add_special_tokens=False) == []


def test_bytes_of_tokens() -> None:
    bpe, sp = small_bpe(), small_sentencepiece()
    assert bpe.token_bytes(bpe.encode(" the")[0]) == b" the"
    assert b"".join(bpe.token_bytes(i) for i in bpe.encode("é😀\n")) == "é😀\n".encode()
    assert bpe.token_bytes(2) == "<|é|>".encode(), "a special token stands for itself"
    assert sp.token_bytes(sp.token_id("<0x0A>") or -1) == b"\n"
    assert sp.token_bytes(sp.token_id("▁the") or -1) == b" the"
    for tk in (bpe, sp):
        assert [tk.token_bytes(i) for i in (-1, tk.vocab_size, 2**31, 2**70)] == [b""] * 4
        assert tk.token_string(tk.vocab_size) is None


def test_a_leading_space_is_kept_after_a_prompt() -> None:
    sp = small_sentencepiece()
    ids = sp.encode("the dog", add_special_tokens=False)
    assert sp.decode(ids) == "the dog"
    assert sp.decode(ids, after_text=True) == " the dog"
    assert small_bpe().decode(small_bpe().encode(" the")) == " the"


def test_lone_surrogates_are_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="lone surrogates"):
        small_bpe().encode("a\ud800b")


def test_truncation_and_padding_of_the_file_are_off() -> None:
    backend = tokenizers.Tokenizer.from_str(bpe_json())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tk = Tokenizer(backend, TextConfig())
    assert tk.encode("the quick brown fox") == small_bpe().encode("the quick brown fox")


def test_added_tokens_beyond_the_vocabulary_keep_their_ids() -> None:
    backend = tokenizers.Tokenizer.from_str(bpe_json())
    size = backend.get_vocab_size()
    backend.add_special_tokens(["<|new|>"])
    backend.add_tokens([tokenizers.AddedToken("<plain>", special=False, normalized=False)])
    tk = Tokenizer(backend, TextConfig())
    assert tk.vocab_size == size + 2
    assert tk.encode("<|new|><plain>") == [size, size + 1]
    assert tk.encode("<|new|><plain>", parse_special=False)[-1] == size + 1, "only special ones become text"
    assert size not in tk.encode("<|new|>", parse_special=False)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_other_decoders_are_refused(decoder: decoders.Decoder | None) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoder
    with pytest.raises(UnsupportedError, match=r"decoder is not supported; expected ByteLevel, or .* got "):
        Tokenizer(backend, TextConfig())


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread keeps the interpreter until it lets go of it itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_forced_switches")
def test_encoding_lets_other_threads_run() -> None:
    """A long text must not hold the interpreter, else the event loop would stand still beside it."""
    text = "the quick brown fox " * 100_000
    began, ended = threading.Event(), threading.Event()

    def encode() -> None:
        began.set()
        small_bpe().encode(text)
        ended.set()

    worker = threading.Thread(target=encode)
    worker.start()
    began.wait()
    ran_meanwhile = not ended.is_set()
    worker.join()
    assert ran_meanwhile
