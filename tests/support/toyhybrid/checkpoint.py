"""Seeded checkpoints of the toy hybrid line, and the line in the registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app import registry
from tests.support.modelfiles import safetensors_file
from tests.support.tinymodel import raw_bytes, rounded
from tests.support.toyhybrid.config import ToyConfig
from tests.support.toyhybrid.weights import TABLE

Array = np.ndarray[Any, Any]
ARCHITECTURE = "ToyHybridForCausalLM"
SMALL = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "delta_key_heads": 2,
    "delta_heads": 4, "delta_dim": 16, "conv_width": 4, "snapshot_every": 64, "max_position_embeddings": 512,
}  # fmt: skip


def write_toy(folder: Path, *, dtype: str = "f32", seed: int = 5, **config: Any) -> Path:
    """A checkpoint with these fields in place of those of SMALL; values are exact in `dtype`."""
    fields = SMALL | config | {"architectures": [ARCHITECTURE]}
    read = ToyConfig.from_hf(fields, "config.json")
    rng = np.random.RandomState(seed)  # its stream is frozen by NumPy's policy
    entries = {}
    for entry, layer in TABLE.entries(read):
        values = rounded(draw(entry.name, entry.sizes(read), rng), dtype)
        entries[entry.hf.name.format(layer)] = (dtype.upper(), values.shape, raw_bytes(values, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes(safetensors_file(entries))
    return folder


def draw(name: str, shape: tuple[int, ...], rng: np.random.RandomState) -> Array:
    """Values that make states matter: a state forgets half of itself in some ten to a hundred tokens."""
    if name.endswith("a_log"):
        return rng.uniform(-2.0, 0.5, shape).astype(np.float32)
    if name.endswith("dt_bias"):
        return rng.uniform(-4.0, -2.0, shape).astype(np.float32)
    if len(shape) == 1:
        return (1 + 0.2 * rng.standard_normal(shape)).astype(np.float32)
    fan_in = shape[0] if name.endswith("taps") else shape[1]
    return (rng.standard_normal(shape) * (1.5 / np.sqrt(fan_in))).astype(np.float32)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two lines that a line adds to the registry."""
    monkeypatch.setitem(registry.LINES, ARCHITECTURE, "tests.support.toyhybrid.engine")
