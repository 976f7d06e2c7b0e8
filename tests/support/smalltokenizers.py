"""Small vocabularies for tests: a byte-level BPE in both of its file forms, and a SentencePiece one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pegainfer.frontend.tokenizer import Tokenizer
from pegainfer.frontend.tokenizer_gguf import tokenizer_from_gguf

DATA = Path(__file__).parents[1] / "data" / "tokenizer"
SPECIAL = ("<|end|>", "<|user|>", "<|é|>")  # ids 0 to 2; the last has a character beyond ASCII
CORPUS = (
    "the quick brown fox jumps over the lazy dog and the other dogs sleep in the shade of the house",
    "def add(first, second):\n    return first + second\n",
    "Les enfants sont allés à l'école, et le maître leur a raconté une histoire très étonnante.",
    "Она читала книгу, пока дети играли в саду. 漢字とひらがな 😀😀👍🏽 in 1984 and 2023",
)


def trained(
    texts: Iterable[str],
    size: int,
    added: list[tokenizers.AddedToken],
    pre: pre_tokenizers.PreTokenizer | None,
    normalizer: normalizers.Normalizer | None,
) -> tokenizers.Tokenizer:
    """A byte-level BPE of `size` tokens, with added ones beside them."""
    backend = tokenizers.Tokenizer(models.BPE())
    if pre is not None:
        backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added)
    return backend


@cache
def bpe_json() -> str:
    """A tokenizer.json with SmolLM's pre-tokenizer, 600 tokens, all 256 bytes among them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend.to_str()


@cache
def bpe_metadata() -> dict[str, Any]:
    """The same as `bpe_json` as a GGUF file's metadata."""
    model = json.loads(bpe_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if t in SPECIAL else 1 for t in tokens], np.int32),
        "tokenizer.ggml.merges": [" ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }


@cache
def sentencepiece_data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / "sentencepiece.json").read_text())
    return data


def sentencepiece_metadata() -> dict[str, Any]:
    """The vocabulary of tests/data/tokenizer/sentencepiece.json as a GGUF file's metadata."""
    data = sentencepiece_data()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": data["tokens"],
        "tokenizer.ggml.scores": np.array(data["scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(data["types"], np.int32),
        "tokenizer.ggml.bos_token_id": data["bos_id"],
        "tokenizer.ggml.eos_token_id": data["eos_id"],
    }


@cache
def small_bpe() -> Tokenizer:
    return tokenizer_from_gguf(bpe_metadata())


@cache
def small_sentencepiece() -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata())
