"""Every kind of file that the line reads, on seeded tiny models, against transformers' float32 values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.tinymodel import token_ids, write_checkpoint
from tests.support.tinyqwen3_5 import MODELS
from tests.support.tinyrun import BACKENDS, compare

GOLDEN = np.load(Path(__file__).parents[3] / "data" / "qwen3_5" / "tiny.npz")
MAX = 1e-3  # nat, float32 against float32, at every position


@pytest.mark.parametrize(("backend", "isa"), BACKENDS, ids=lambda v: v or "numpy")
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_greedy_tokens(name: str, backend: str, isa: str | None, tmp_path: Path) -> None:
    model = MODELS[name]
    found = compare(write_checkpoint(model, tmp_path), token_ids(model), GOLDEN, name, backend, isa)
    assert found.greedy == found.wanted
    assert found.errors.max() <= MAX
