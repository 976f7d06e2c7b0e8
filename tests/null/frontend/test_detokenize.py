"""Streams equal the whole: pieces of text however the tokens come, stop strings however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.detokenize import Detokenizer, StopStrings
from pegainfer.frontend.tokenizer import Tokenizer
from tests.support.smalltokenizers import small_bpe, small_sentencepiece

TOKENIZERS = st.sampled_from([small_bpe(), small_sentencepiece()])
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@given(TOKENIZERS, st.lists(st.integers(0, 620)), st.booleans(), st.booleans())
def test_pieces_of_any_ids_join_to_the_whole(
    tk: Tokenizer, ids: list[int], skip: bool, after_text: bool
) -> None:
    stream = Detokenizer(tk, skip_special_tokens=skip, after_text=after_text)
    pieces = [stream.push(i) for i in ids]
    whole = tk.decode(ids, skip_special_tokens=skip, after_text=after_text)
    shown = "".join(pieces)
    assert whole.startswith(shown)
    assert shown + stream.flush(replace_incomplete=True) == whole


@given(TOKENIZERS, UNICODE)
def test_text_never_shows_half_a_character(tk: Tokenizer, text: str) -> None:
    """Every piece of an encoded text is a part of it, and each character comes as soon as it is complete."""
    text = text.replace("▁", " ").replace("\ufffd", "")
    ids = tk.encode(text, add_special_tokens=False, parse_special=False)
    stream = Detokenizer(tk, after_text=False)
    shown = ""
    for count, token in enumerate(ids, 1):
        shown += stream.push(token)
        assert text.startswith(shown)
        complete = tk.decode(ids[:count]).rstrip("\ufffd")
        assert shown == complete
    assert shown + stream.flush() == text


def test_half_a_character_at_the_end_is_dropped_or_replaced() -> None:
    tk = small_bpe()
    ids = [tk.token_id(c) or -1 for c in "ðŁĺ"]  # the first three of the four bytes of 😀
    for replace, expected in ((False, ""), (True, "\ufffd")):
        stream = Detokenizer(tk)
        assert [stream.push(i) for i in ids] == ["", "", ""]
        assert stream.flush(replace_incomplete=replace) == expected
        assert stream.push(tk.encode("a")[0]) == "a", "flush leaves nothing behind"


def test_a_broken_character_is_replaced_once_it_is_known() -> None:
    tk = small_bpe()
    stream = Detokenizer(tk)
    assert stream.push(tk.token_id("ð") or -1) == ""
    assert stream.push(tk.encode("a")[0]) == "\ufffda"


def test_special_tokens_and_unknown_ids() -> None:
    tk = small_bpe()
    a = tk.encode("a")[0]
    assert [Detokenizer(tk).push(i) for i in (1, a, 99_999, 0)] == ["", "a", "", ""]
    keep = Detokenizer(tk, skip_special_tokens=False)
    assert [keep.push(i) for i in (1, a, 2)] == ["<|user|>", "a", "<|é|>"]


def test_sentencepiece_streams_bytes_and_keeps_the_space_after_a_prompt() -> None:
    tk = small_sentencepiece()
    ids = tk.encode("the 漢", add_special_tokens=False)
    stream = Detokenizer(tk)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == " the 漢"
    assert pieces[-3:] == ["", "", "漢"]
    assert "".join(map(Detokenizer(tk, after_text=False).push, ids)) == "the 漢"


# Stop strings. The oracle knows the whole text: the match that ends first counts, of those the longest.


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held_back(stops: list[str], text: str) -> int:
    """The length of the longest end of the text that a stop string begins with."""
    return max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)


WORDS = st.text("ab", min_size=1, max_size=6) | st.text("aé😀\n", min_size=1, max_size=3)


@settings(max_examples=500)
@given(st.lists(WORDS, min_size=1, max_size=16), st.lists(st.text("abé😀\n", max_size=4)))
@example(["abab", "bb"], ["aba", "", "bb"])
@example(["aab"], ["aaab"])
@example(["ab", "b"], ["ab"])
def test_stops_whatever_the_cuts(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        text, stop = matcher.push(piece)
        shown += text
        wanted, wanted_stop = oracle(stops, seen)
        assert stop == wanted_stop
        if stop is not None:
            assert shown == wanted
            return
        assert shown == seen[: len(seen) - held_back(stops, seen)]
    assert shown + matcher.flush() == seen


def test_a_false_prefix_is_released() -> None:
    matcher = StopStrings(["DEFGHIJ"])
    assert matcher.push("ABC D") == ("ABC ", None)
    assert matcher.push("EF") == ("", None)
    assert matcher.push("x") == ("DEFx", None)
    assert matcher.push("DEFG") == ("", None)
    assert matcher.push("HIJK") == ("", "DEFGHIJ")


def test_what_is_held_comes_out_at_the_end() -> None:
    matcher = StopStrings(["\n\n"])
    assert matcher.push("end.\n") == ("end.", None)
    assert matcher.flush() == "\n"
    assert matcher.flush() == ""
    assert matcher.push("\n") == ("", None), "nothing of the flushed text counts any more"


def test_no_stop_strings() -> None:
    matcher = StopStrings([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "match"),
    [
        ([""], "expected 1 to 1024 bytes; got 0"),
        (["é" * 513], "got 1026"),
        (["x"] * 17, "too many stop strings; expected ≤ 16; got 17"),
    ],
)
def test_limits(stops: list[str], match: str) -> None:
    with pytest.raises(RequestError, match=match) as e:
        StopStrings(stops)
    assert e.value.param == "stop"
    StopStrings(["é" * 512] * 16)
