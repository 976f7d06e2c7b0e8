"""A continuation's text, stop strings and logprobs must not depend on how its tokens are cut into events."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.frontend.detokenize import Detokenizer, StopStrings
from pegainfer.frontend.http.answer.choice import Choice, Delta
from tests.support.fake_engine import logprob_of

TOKENIZER = byte_tokenizer()
EOS = 257


def make(stops: tuple[str, ...] = (), **options: object) -> Choice:
    detokenizer = Detokenizer(TOKENIZER)
    return Choice(0, detokenizer, StopStrings(stops) if stops else None, **options)  # type: ignore[arg-type]


def feed(
    choice: Choice,
    tokens: list[int],
    cuts: Sequence[int] = (),
    *,
    finish: FinishReason | None = FinishReason.LENGTH,
    stop_token: int | None = None,
) -> list[Delta]:
    """Feeds tokens in events that end at `cuts`, the last one with the finish, until the choice ends."""
    bounds = [0, *sorted(c % (len(tokens) + 1) for c in cuts), len(tokens)]
    deltas = []
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        last = i == len(bounds) - 2
        event = TokenEvent(
            request_id="r",
            tokens=tuple(tokens[a:b]),
            logprobs=tuple(logprob_of(t, 1) for t in tokens[a:b]),
            finish=finish if last else None,
            stop_token=stop_token if last else None,
        )
        deltas.append(choice.feed(event))
        if choice.finish is not None:
            break
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(d.text for d in deltas)


def named(deltas: list[Delta]) -> bytes:
    """The bytes of the tokens whose logprobs were given."""
    return b"".join(TOKENIZER.token_bytes(e.logprob.token) for d in deltas for e in d.entries)


words = st.text("aábc😀", max_size=40)
cut_lists = st.lists(st.integers(0, 200), max_size=12)


@given(words, cut_lists)
def test_text_and_logprobs_add_up_however_events_are_cut(text: str, cuts: list[int]) -> None:
    deltas = feed(make(), list(text.encode()), cuts)
    assert text_of(deltas) == text
    assert named(deltas) == text.encode()
    assert deltas[-1].finish == "length"
    assert sum(len(d.tokens) for d in deltas) == len(text.encode())


@given(words, cut_lists, st.lists(st.text("aábc", min_size=1, max_size=3), min_size=1, max_size=3))
def test_no_piece_of_a_stop_string_is_shown(text: str, cuts: list[int], stops: list[str]) -> None:
    choice = make(tuple(stops))
    deltas = feed(choice, list(text.encode()), cuts)
    shown = text_of(deltas)
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    if not ends:
        assert shown == text
        assert deltas[-1].finish == "length"
        assert named(deltas) == text.encode()
        return
    end, length = min(ends)
    assert shown == text[: end + length]
    assert deltas[-1].finish == "stop"
    assert deltas[-1].stop_reason == text[end + length : end]
    assert choice.num_tokens == len(text[:end].encode())  # usage ends with the stop string
    assert named(deltas) == shown.encode()


@given(words, cut_lists, st.text("aábc", min_size=1, max_size=3))
def test_each_delta_brings_the_logprobs_of_its_own_text(text: str, cuts: list[int], stop: str) -> None:
    """What was shown so far is never ahead of the logprobs by a whole token, nor behind."""
    deltas = feed(make((stop,)), list(text.encode()), cuts)
    shown, logged = "", b""
    for delta in deltas:
        shown += delta.text
        logged += named([delta])
        assert logged == shown.encode()


def test_half_a_character_is_never_shown() -> None:
    deltas = feed(make(), list("é😀".encode()), list(range(10)))
    assert all("�" not in d.text for d in deltas)
    assert text_of(deltas) == "é😀"


def test_half_a_character_at_the_end_is_dropped() -> None:
    deltas = feed(make(), list("aé".encode()[:-1]))
    assert text_of(deltas) == "a"


def test_a_false_beginning_of_a_stop_string_is_released() -> None:
    choice = make(("DEFG",))
    deltas = feed(choice, list(b"ABCDEF!xDE"), list(range(1, 10)))
    assert [d.text for d in deltas][:7] == ["A", "B", "C", "", "", "", "DEF!"]
    assert text_of(deltas) == "ABCDEF!xDE"  # what is held at the end comes out, too


def test_a_match_among_several_tokens_of_one_event_drops_the_rest() -> None:
    choice = make(("STOP",))
    (delta,) = feed(choice, list(b"abSTOPcd"))
    assert (delta.text, delta.finish, delta.stop_reason) == ("ab", "stop", "STOP")
    assert delta.tokens == list(b"abSTOP")
    assert choice.num_tokens == 6


def test_the_stop_string_is_shown_on_request() -> None:
    (delta,) = feed(make(("STOP",), show_stop=True), list(b"abSTOPcd"))
    assert (delta.text, delta.finish) == ("abSTOP", "stop")
    assert named([delta]) == b"abSTOP"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    (delta,) = feed(make(("cd", "b")), list(b"abcd"))
    assert (delta.text, delta.stop_reason) == ("a", "b")


def test_stop_strings_count_only_after_min_tokens() -> None:
    choice = make(("b",), min_tokens=3)
    (delta,) = feed(choice, list(b"abcabc"))
    assert (delta.text, delta.finish, choice.num_tokens) == ("abca", "stop", 5)


def test_eos_ends_the_text_and_has_no_logprob() -> None:
    choice = make()
    deltas = feed(choice, [*b"ab", EOS], [1], finish=FinishReason.STOP, stop_token=EOS)
    assert text_of(deltas) == "ab"
    assert deltas[-1].finish == "stop"
    assert deltas[-1].stop_reason is None
    assert named(deltas) == b"ab"
    assert choice.num_tokens == 3


def test_a_users_stop_token_is_the_stop_reason() -> None:
    choice = make(user_stops={120: 120})
    deltas = feed(choice, list(b"abx"), finish=FinishReason.STOP, stop_token=120)
    assert text_of(deltas) == "ab"
    assert deltas[-1].stop_reason == 120


def test_a_stop_tokens_text_is_shown_on_request() -> None:
    deltas = feed(make(show_stop=True), list(b"abx"), finish=FinishReason.STOP, stop_token=120)
    assert text_of(deltas) == "abx"
    assert named(deltas) == b"abx"


def test_a_stop_token_completes_no_stop_string() -> None:
    deltas = feed(make(("bx",)), list(b"abx"), finish=FinishReason.STOP, stop_token=120)
    assert text_of(deltas) == "ab"
    assert deltas[-1].finish == "stop"


def test_with_token_ids_the_eos_keeps_its_logprob() -> None:
    deltas = feed(make(all_logprobs=True), [97, EOS], finish=FinishReason.STOP, stop_token=EOS)
    assert [e.logprob.token for d in deltas for e in d.entries] == [97, EOS]
    assert [t for d in deltas for t in d.tokens] == [97, EOS]


def test_an_abort_shows_what_was_held() -> None:
    deltas = feed(make(("xyz",)), list(b"abxy"), finish=FinishReason.ABORT)
    assert text_of(deltas) == "abxy"
    assert deltas[-1].finish == "abort"


def test_an_error_says_why() -> None:
    event = TokenEvent(
        request_id="r",
        finish=FinishReason.ERROR,
        error="no room",
        error_kind="QueueFullError",
        retry_after=2.0,
    )
    delta = make().feed(event)
    assert delta.finish == "error"
    assert delta.error is not None
    assert (delta.error.status, delta.error.retry_after, delta.error.message) == (503, 2.0, "no room")
