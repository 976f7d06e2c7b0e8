"""A tokenizer without a model: ids 0 to 255 are the bytes. For the null device and for tests."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pegainfer.frontend.spelling import BYTE_OF_CHAR
from pegainfer.frontend.tokenizer import TextConfig, Tokenizer

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")  # ids 256 and 257
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(added: Sequence[str] = ()) -> Tokenizer:
    """Every text round-trips; <|im_end|> ends a sequence; chats are written as ChatML.

    added: texts that are tokens of their own, with ids from VOCAB_SIZE on, and not special ones.
    """
    vocabulary = {char: byte for char, byte in BYTE_OF_CHAR.items()}
    # Without words, a whole text would be an entry of the library's cache of words, and hold 10,000 texts.
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[], cache_capacity=0))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in added])
    config = TextConfig(
        eos_token_ids=(257,),
        special_tokens={"eos_token": SPECIAL_TOKENS[1]},
        chat_template=CHATML,
    )
    return Tokenizer(backend, config)
