"""How many ids the tokens of a model have. The head may have more rows, whose logits must not be drawn from.

Reads the files as the tokenizer does, but only for the numbers in them: the engine's process has no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pegainfer.contract.errors import ModelFileError
from pegainfer.frontend.vocabulary_files import RANKS, RESERVED, read_ranks
from pegainfer.runtime.weights.gguf_split import open_gguf

MAX_TOKENIZER_BYTES = 256 << 20
UNUSED = 5  # in tokenizer.ggml.token_type: a row of the head that the converter has given a name


class _AddedToken(msgspec.Struct):
    id: int


class _Vocabulary(msgspec.Struct):
    # Unigram models have a list of pieces, all others ids by token.
    vocab: dict[str, int] | list[msgspec.Raw]


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary | None = None  # what the tokenizer is made from is its reader's to check
    added_tokens: list[_AddedToken] = []


def known_ids(path: Path) -> int | None:
    """The highest token id plus one; None where nothing says what the tokens are.

    Args:
        path: a .gguf file, or a folder that may have a tokenizer.json or tiktoken.model.

    Raises ModelFileError for one that cannot be read.
    """
    if not path.is_dir():
        with open_gguf(path) as opened:
            return known_ids_of_gguf(opened.metadata)
    file = path / "tokenizer.json"
    try:
        data = file.read_bytes() if file.stat().st_size <= MAX_TOKENIZER_BYTES else b""
        found = msgspec.json.decode(data, type=_TokenizerFile)
    except FileNotFoundError:
        ranks = path / RANKS
        return len(read_ranks(ranks)) + RESERVED if ranks.exists() else None
    except (OSError, msgspec.DecodeError) as e:
        raise ModelFileError(
            "tokenizer.json cannot be read", expected=f"a tokenizer in at most {MAX_TOKENIZER_BYTES} bytes",
            got=f"{e!s:.200}", where=file,
        ) from None  # fmt: skip
    if found.model is None:
        return None
    vocab = found.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return 1 + max((*ids, *(token.id for token in found.added_tokens)), default=-1)


def known_ids_of_gguf(metadata: Mapping[str, Any]) -> int | None:
    """As `known_ids`. Tokens at the end that only give the head's last rows a name are left out."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    count, types = len(tokens), metadata.get("tokenizer.ggml.token_type")
    while types is not None and 0 < count <= len(types) and types[count - 1] == UNUSED:
        count -= 1
    return count
