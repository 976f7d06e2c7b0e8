"""A byte-level BPE tokenizer from the ranks in tiktoken.model, which Kimi-K2's folders have in place of
tokenizer.json.

Kimi's own code also cuts texts every 400,000 characters, and runs of 25,000 characters without a blank; here
they are encoded whole, so that ids next to such a cut may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.frontend.pre_tokenizers import PRE_TOKENIZERS
from pegainfer.frontend.spelling import BYTE_OF_CHAR
from pegainfer.frontend.vocabulary_files import RANKS, RESERVED, read_ranks

_CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def tiktoken_backend(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a folder with tiktoken.model.

    Args:
        settings: of tokenizer_config.json, which name the special tokens.

    Raises ModelFileError; UnsupportedError for other models than Kimi, whose words are cut in other ways.
    """
    code = settings.get("auto_map")
    if "tokenization_kimi" not in str(code):
        raise UnsupportedError(
            f"{RANKS} of this model", expected="an auto_map with tokenization_kimi in tokenizer_config.json",
            got=code, where=folder, remedy="use a folder with tokenizer.json",
        )  # fmt: skip
    ranks = read_ranks(folder / RANKS)
    spelled = {token: "".join(_CHAR_OF_BYTE[byte] for byte in token) for token in ranks}
    pairs = (_last_merge(ranks, token, rank) for token, rank in ranks.items() if len(token) > 1)
    merges = [(spelled[left], spelled[right]) for left, right in filter(None, pairs)]
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    kind = PRE_TOKENIZERS["kimi-k2"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.whole_words)
    )
    backend.pre_tokenizer = kind.split()
    backend.decoder = tokenizers.decoders.ByteLevel()
    _add_reserved(backend, settings, len(ranks), folder)
    return backend


def _last_merge(ranks: Mapping[bytes, int], token: bytes, rank: int) -> tuple[bytes, bytes] | None:
    """The two tokens that merges of lower ranks make of a token's bytes; None where they make more."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        best = min(found)
        if best >= rank:
            return None
        at = found.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _add_reserved(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], first: int, folder: Path
) -> None:
    """Gives the ids after the ranks the names that the settings have for them. Raises ModelFileError."""
    named = settings.get("added_tokens_decoder")
    named = named if isinstance(named, dict) else {}
    for id in range(first, first + RESERVED):
        entry = named.get(str(id))
        entry = entry if isinstance(entry, dict) else {}
        text = entry.get("content", f"<|reserved_token_{id}|>")
        special = entry.get("special", True) is True
        token = tokenizers.AddedToken(str(text), special=special, normalized=False)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
        if backend.token_to_id(str(text)) != id:
            raise ModelFileError(
                "a special token is named twice", got=f"{text!r:.60}, id {id}",
                where=folder / "tokenizer_config.json",
            )  # fmt: skip
