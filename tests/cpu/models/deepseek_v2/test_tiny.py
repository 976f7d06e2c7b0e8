"""Every kind of file that the line reads, on seeded tiny models, against transformers' float32 values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.deepseekgguf import GGUF_MODELS, write_gguf
from tests.support.tinydeepseek import KIMI_WITH_VISION, MODELS
from tests.support.tinymodel import token_ids, write_checkpoint
from tests.support.tinyrun import BACKENDS, compare

GOLDEN = np.load(Path(__file__).parents[3] / "data" / "deepseek_v2" / "tiny.npz")
MEAN, MAX = 1e-3, 1e-2  # nat, float32 against float32


def written(name: str, folder: Path) -> tuple[Path, list[int]]:
    """The model's file or folder, and its fixed text."""
    if name in MODELS:
        return write_checkpoint(MODELS[name], folder / name), token_ids(MODELS[name])
    model, formats, split = GGUF_MODELS[name]
    return write_gguf(model, folder / f"{name}.gguf", formats, split=split), token_ids(model)


@pytest.mark.parametrize(("backend", "isa"), BACKENDS, ids=lambda v: v or "numpy")
@pytest.mark.parametrize("name", [*MODELS, *GGUF_MODELS])
def test_logprobs_and_greedy_tokens(name: str, backend: str, isa: str | None, tmp_path: Path) -> None:
    path, ids = written(name, tmp_path)
    found = compare(path, ids, GOLDEN, name, backend, isa)
    assert found.greedy == found.wanted
    assert found.errors.mean() <= MEAN
    assert found.errors.max() <= MAX


def test_a_text_model_beside_a_vision_tower_is_the_same_model(tmp_path: Path) -> None:
    path = write_checkpoint(KIMI_WITH_VISION, tmp_path)
    found = compare(path, token_ids(KIMI_WITH_VISION), GOLDEN, "kimi_text_f32", "cpu", None)
    assert found.greedy == found.wanted
    assert found.errors.max() <= MAX
