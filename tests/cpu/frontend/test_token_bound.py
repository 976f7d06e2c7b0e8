"""The least number of a text's tokens, on the vocabularies of real models."""

from __future__ import annotations

import unicodedata
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pegainfer.frontend.tokenizer import Tokenizer

LICENSE = (Path(__file__).parents[3] / "LICENSE").read_text()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_text_has_fewer_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Of the vocabulary's own tokens, repeated, as they are and with Unicode taken apart."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=40))
    text = tokenizer.decode(ids, skip_special_tokens=False) * data.draw(st.integers(1, 20))
    for form in (text, unicodedata.normalize("NFD", text)):
        (whole,) = tokenizer.encode_batch([form], add_special_tokens=False)
        assert tokenizer.bound.at_least(form, 1 << 30) <= len(whole)


def test_the_longest_tokens_are_no_fewer(tokenizer: Tokenizer) -> None:
    longest = sorted(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.token_bytes(i)))[-200:]
    for token in longest:
        text = tokenizer.decode([token] * 50, skip_special_tokens=False)
        (whole,) = tokenizer.encode_batch([text], add_special_tokens=False)
        assert tokenizer.bound.at_least(text, 1 << 30) <= len(whole)


def test_of_english_it_tells_a_tenth(tokenizer: Tokenizer) -> None:
    text = LICENSE * 10
    (whole,) = tokenizer.encode_batch([text], add_special_tokens=False)
    assert tokenizer.bound.at_least(text, 1 << 30) > len(whole) // 10
