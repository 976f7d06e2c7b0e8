"""The files of a model folder that hold a vocabulary, and the reader of a list of ranks.

Apart from the tokenizers, so that a process without text need not load their library.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from pegainfer.contract.errors import ModelFileError

RANKS = "tiktoken.model"
VOCABULARIES = ("tokenizer.json", RANKS)  # the first that a folder has is read
MAX_BYTES = 64 << 20
RESERVED = 256  # ids after the ranks, which belong to special tokens


def has_vocabulary(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARIES)


def read_ranks(path: Path) -> dict[bytes, int]:
    """The file's tokens by their ids, which count from 0. Raises ModelFileError."""
    try:
        size = path.stat().st_size
        lines = path.read_bytes().splitlines() if size <= MAX_BYTES else []
    except OSError as e:
        raise ModelFileError(f"cannot read tokenizer: {e.strerror}", where=path) from None
    if size > MAX_BYTES:
        raise ModelFileError("file is too large", expected=f"≤ {MAX_BYTES} bytes", got=size, where=path)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines):
        text, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(text, validate=True)
        except binascii.Error:
            token = b""
        if not token or token in ranks or rank.strip() != str(number).encode():
            raise ModelFileError(
                f"line {number + 1} of a list of ranks", expected=f"a new token in base64, then {number}",
                got=repr(line[:60]), where=path,
            )  # fmt: skip
        ranks[token] = number
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ModelFileError("a list of ranks lacks single bytes", got=missing[:8], where=path)
    return ranks
