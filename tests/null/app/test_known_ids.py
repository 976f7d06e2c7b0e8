"""How many ids a model's tokenizer has, and that an engine is bounded to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.app.known_ids import known_ids, known_ids_of_gguf
from pegainfer.contract.errors import ModelFileError
from pegainfer.engine.config import SchedulerConfig
from tests.support.tinymodel import MODELS, VOCAB, write_checkpoint


def write_tokenizer(folder: Path, vocab: Any, added: list[int]) -> Path:
    parsed = {"version": "1.0", "added_tokens": [{"id": i, "content": f"<{i}>"} for i in added]}
    (folder / "tokenizer.json").write_text(json.dumps(parsed | {"model": {"type": "BPE", "vocab": vocab}}))
    return folder


@pytest.mark.parametrize(
    ("vocab", "added", "want"),
    [
        ({"a": 0, "b": 1}, [], 2),
        ({"a": 0, "b": 1}, [2, 3], 4),
        ({"a": 7, "b": 1}, [2], 8),
        ([["a", -1.0], ["b", -2.0]], [], 2),
        ({}, [], 0),
    ],
)
def test_of_a_folder(vocab: Any, added: list[int], want: int, tmp_path: Path) -> None:
    assert known_ids(write_tokenizer(tmp_path, vocab, added)) == want


def test_without_a_tokenizer(tmp_path: Path) -> None:
    assert known_ids(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert known_ids(tmp_path) is None and known_ids_of_gguf({}) is None


def test_of_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": "b"}}}')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json cannot be read"):
        known_ids(tmp_path)


def test_of_gguf_metadata() -> None:
    """Unused tokens between others have ids all the same."""
    tokens = {"tokenizer.ggml.tokens": ["a", "b", "c", "[PAD3]", "[PAD4]"]}
    assert known_ids_of_gguf(tokens) == 5
    assert known_ids_of_gguf(tokens | {"tokenizer.ggml.token_type": [1, 5, 3, 5, 5]}) == 3


@pytest.mark.parametrize("other", [False, True], ids=["own tokenizer", "another tokenizer"])
def test_an_engine_accepts_and_draws_known_ids_only(other: bool, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = write_checkpoint(MODELS["tied_f32"], tmp_path / "model")
    write_tokenizer(folder, {str(i): i for i in range(VOCAB - 10)}, [VOCAB - 10, VOCAB - 9])
    replacing = None
    if other:
        (tmp_path / "other").mkdir()
        replacing = write_tokenizer(tmp_path / "other", {str(i): i for i in range(VOCAB - 20)}, [])
    config = EngineConfig(backend="reference", max_model_len=64)
    scheduler = SchedulerConfig(max_slots=2)
    engine = build_engine(folder, "m", config, scheduler, tokenizer=replacing)
    try:
        assert engine.info.vocab_size == engine.runner.info.vocab_size == (VOCAB - 20 if other else VOCAB - 8)
    finally:
        engine.runner.close()
