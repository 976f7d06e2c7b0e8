"""Chats in pieces, on the vocabularies of real models."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from pegainfer.frontend.pieces import MIN_CHARS
from pegainfer.frontend.tokenizer import Tokenizer

FRAGMENTS = [
    "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>\n",
    "</think>", "<tool_call>", "</tool_call>", "<|im_", "start|>", " ", "\n\n", "    return x\n", "don't",
    "Ça va", "e\u0301", "漢字", "😀", "1984", "\u00a0", "\t",
]  # fmt: skip
texts = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
    max_size=60,
).map("".join)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=texts)
def test_random_chats(tokenizer: Tokenizer, text: str) -> None:
    (whole,) = tokenizer.encode_batch([text], add_special_tokens=False)
    encode = partial(tokenizer.encode_batch, add_special_tokens=False)
    assert tokenizer.pieces.encode(text, encode) == whole


def test_an_agents_turns(tokenizer: Tokenizer) -> None:
    """Each turn goes on from the last one; only what is new is encoded."""
    text = "<|im_start|>system\n" + "You write Python.\n" * 20 + "<|im_end|>\n"
    assert len(text) >= MIN_CHARS
    tokenizer.encode(text, add_special_tokens=False)
    for turn in range(6):
        known = tokenizer.pieces.known_chars
        added = f"<|im_start|>user\nWhat of file{turn}.py?<|im_end|>\n<|im_start|>assistant\n"
        (whole,) = tokenizer.encode_batch([text + added], add_special_tokens=False)
        assert tokenizer.encode(text + added, add_special_tokens=False) == whole
        assert tokenizer.pieces.known_chars - known >= len(text) - len("<|im_start|>assistant\nDone.")
        text += added + "Done.<|im_end|>\n"
