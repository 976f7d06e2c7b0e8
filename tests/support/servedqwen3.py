"""A tiny Qwen3 with a text side: what a user would give to `pegainfer serve`."""

from __future__ import annotations

from pathlib import Path

from tests.support.qwentext import small_metadata, write_text
from tests.support.tinymodel import by_role, write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3, write_gguf

# Speaks the small vocabulary of tests/support/qwentext.py, with rows to spare as the real ones have.
SERVED = TinyQwen3(
    "served", seed=51, dtype="bf16", config={"vocab_size": 512, "max_position_embeddings": 512}
)


def write_served_folder(folder: Path) -> Path:
    """A whole model folder: config, weights, tokenizer, chat template, generation config."""
    return write_text(write_checkpoint(SERVED, folder))


def write_served_gguf(path: Path) -> Path:
    """The same model in one file, quantised to 8 bits."""
    return write_gguf(SERVED, path, by_role("q8_0", "q8_0", "q8_0"), small_metadata())
