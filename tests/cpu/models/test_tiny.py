"""Every kind of file that each line reads, on seeded tiny models, against transformers' float32 values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import (
    deepseekgguf,
    tinydeepseek,
    tinymodel,
    tinyqwen3,
    tinyqwen3_5,
    tinyqwen3_5moe,
    tinyqwen3moe,
)
from tests.support.tinymodel import token_ids, write_checkpoint
from tests.support.tinyrun import BACKENDS, compare

DATA = Path(__file__).parents[2] / "data"


@dataclass(frozen=True)
class Line:
    """The tiny models of a line.

    Args:
        golden: file of the values, in tests/data.
        models: checkpoints by name.
        gguf_models: by name a model, its storage formats and what else `write_gguf` takes.
        mean, most: bounds in nat of the error of float32 against float32, over all positions.
    """

    golden: str
    models: Mapping[str, Any]
    gguf_models: Mapping[str, tuple[Any, ...]]
    write_gguf: Callable[..., Path]
    mean: float = 1e-3
    most: float = 1e-2

    def written(self, name: str, folder: Path) -> tuple[Path, list[int]]:
        """The model's file or folder, and its fixed text."""
        if name in self.models:
            return write_checkpoint(self.models[name], folder / name), token_ids(self.models[name])
        model, *rest = self.gguf_models[name]
        return self.write_gguf(model, folder / f"{name}.gguf", *rest), token_ids(model)


def of_module(golden: str, module: Any, **bounds: float) -> Line:
    return Line(golden, module.MODELS, module.GGUF_MODELS, module.write_gguf, **bounds)


DEEPSEEK = Line(
    "deepseek_v2/tiny.npz", tinydeepseek.MODELS, deepseekgguf.GGUF_MODELS, deepseekgguf.write_gguf
)
LINES = {
    "llama": of_module("llama/tiny.npz", tinymodel),
    "qwen3": of_module("qwen3/tiny.npz", tinyqwen3),
    "qwen3_moe": of_module("qwen3_moe/tiny.npz", tinyqwen3moe),
    "qwen3_5": of_module("qwen3_5/tiny.npz", tinyqwen3_5, most=1e-3),
    "qwen3_5 with experts": of_module("qwen3_5/moe.npz", tinyqwen3_5moe, most=1e-3),
    "deepseek_v2": DEEPSEEK,
}
CASES = [(line, name) for line, of in LINES.items() for name in (*of.models, *of.gguf_models)]


@pytest.mark.parametrize(("backend", "isa"), BACKENDS, ids=lambda v: v or "numpy")
@pytest.mark.parametrize(("line", "name"), CASES)
def test_logprobs_and_greedy_tokens(
    line: str, name: str, backend: str, isa: str | None, tmp_path: Path
) -> None:
    tiny = LINES[line]
    path, ids = tiny.written(name, tmp_path)
    found = compare(path, ids, np.load(DATA / tiny.golden), name, backend, isa)
    assert found.greedy == found.wanted
    assert found.errors.mean() <= tiny.mean
    assert found.errors.max() <= tiny.most


def test_a_text_model_beside_a_vision_tower_is_the_same_model(tmp_path: Path) -> None:
    path = write_checkpoint(tinydeepseek.KIMI_WITH_VISION, tmp_path)
    ids = token_ids(tinydeepseek.KIMI_WITH_VISION)
    found = compare(path, ids, np.load(DATA / DEEPSEEK.golden), "kimi_text_f32", "cpu", None)
    assert found.greedy == found.wanted
    assert found.errors.max() <= DEEPSEEK.most
