"""How vocabularies spell bytes: GPT-2's alphabet, and SentencePiece's spaces."""

from __future__ import annotations

from collections.abc import Mapping

SPACE_MARK = "▁"  # U+2581, SentencePiece's visible space


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR: Mapping[str, int] = _byte_alphabet()
