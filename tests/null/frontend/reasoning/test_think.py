"""Thoughts and answer, however the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.frontend.reasoning.think import ThinkScanner, ThinkState, ThinkSyntax

OPEN, CLOSED, UNKNOWN = ThinkState.OPEN, ThinkState.CLOSED, ThinkState.UNKNOWN


CALLS = "<|calls|>"


def split(state: ThinkState, pieces: list[str], calls: str | None = None) -> tuple[str, str]:
    scanner = ThinkScanner(ThinkSyntax(calls=calls), state)
    found = [*(scanner.push(piece) for piece in pieces), scanner.flush()]
    return "".join(r for r, _ in found), "".join(c for _, c in found)


@pytest.mark.parametrize(
    ("state", "text", "reasoning", "content"),
    [
        (OPEN, "I see.\n</think>\n\nYes.", "I see.", "Yes."),
        (OPEN, "\nnever ends", "never ends", ""),
        (OPEN, "a </thin b", "a </thin b", ""),
        (UNKNOWN, "<think>\nI see.\n</think>\n\nYes.\n", "I see.", "Yes.\n"),
        (UNKNOWN, "\n<think></think>Yes", "", "Yes"),
        (UNKNOWN, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (UNKNOWN, "<thin", "", "<thin"),
        (UNKNOWN, "", "", ""),
        (CLOSED, " Yes </think> no", "", " Yes </think> no"),
    ],
)
def test_examples(state: ThinkState, text: str, reasoning: str, content: str) -> None:
    assert split(state, [text]) == (reasoning, content)
    assert split(state, list(text)) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("I look.\n<|calls|>{}</think>", "I look.", "<|calls|>{}</think>"),
        ("I look.</think>\n<|calls|>{}", "I look.", "<|calls|>{}"),
        ("a <|calls", "a <|calls", ""),
        ("a </<|calls|>", "a </", "<|calls|>"),
    ],
)
def test_tool_calls_end_the_thoughts(text: str, reasoning: str, content: str) -> None:
    assert split(OPEN, [text], CALLS) == (reasoning, content)
    assert split(OPEN, list(text), CALLS) == (reasoning, content)


FRAGMENTS = ["<think>", "</think>", "<", "</th", "think>", CALLS, "<|ca", " ", "\n", "a", "ü"]


@given(
    st.sampled_from(ThinkState),
    st.sampled_from([None, CALLS]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.data(),
)
def test_every_split_gives_the_same(
    state: ThinkState, calls: str | None, text: str, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert split(state, pieces, calls) == split(state, [text], calls)


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n", UNKNOWN),
        ("<|im_start|>assistant\n<think>\n", OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", CLOSED),
        ("<｜Assistant｜></think>", CLOSED),
    ],
)
def test_the_prompt_tells_where_an_answer_begins(prompt: str, state: ThinkState) -> None:
    assert ThinkSyntax().state_after(prompt) is state
