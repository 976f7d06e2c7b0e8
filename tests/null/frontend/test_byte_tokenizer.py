from __future__ import annotations

import datetime

from hypothesis import given
from hypothesis import strategies as st

from pegainfer.frontend.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, byte_tokenizer
from pegainfer.frontend.chat_template import ChatTemplate

TOKENIZER = byte_tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_its_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text, parse_special=False)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_follow_the_bytes() -> None:
    assert TOKENIZER.vocab_size == VOCAB_SIZE == 258
    assert TOKENIZER.encode("a<|im_start|><|im_end|>") == [97, 256, 257]
    assert TOKENIZER.eos_token_ids == (257,)
    assert TOKENIZER.decode([97, 257]) == "a"
    assert TOKENIZER.decode([97, 257], skip_special_tokens=False) == "a" + SPECIAL_TOKENS[1]
    assert [TOKENIZER.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]


def test_chats_are_chatml() -> None:
    template = ChatTemplate(TOKENIZER.chat_template or "", TOKENIZER.config.special_tokens)
    text = template.render([{"role": "user", "content": "hi"}], now=datetime.datetime(2026, 11, 28))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
