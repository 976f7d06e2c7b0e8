"""A KV cache of 8-bit floats on the CPU: beside the references, with scales, and the warning about clipped
values."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.event import TokenLogprob
from tests.support.tinymodel import token_ids, write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3
from tests.support.tinyrun import forced

MODEL = TinyQwen3("scaled", seed=71)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CLIPS = "the fp8 KV cache clips keys or values"


def checkpoint(folder: Path, k_scale: float, v_scale: float) -> Path:
    """The model with these scales in every layer, as compressed-tensors stores them."""
    scales = {
        f"model.layers.{i}.self_attn.{which}_scale": np.array([value], np.float32)
        for i in range(MODEL.hf_config()["num_hidden_layers"])
        for which, value in (("k", k_scale), ("v", v_scale))
    }
    write_checkpoint(MODEL, folder, {**MODEL.tensors(), **scales})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scored(folder: Path, backend: str, kv: str) -> list[TokenLogprob]:
    """What follows each token of a text."""
    return forced(folder, token_ids(MODEL), MODEL.name, 4, backend=backend, kv_dtype=kv)[0]


@pytest.mark.parametrize(("k_scale", "v_scale"), [(1.0, 1.0), (0.02, 0.03)])
def test_scores(k_scale: float, v_scale: float, tmp_path: Path) -> None:
    """A number of e4m3 is off by 2^-4 of itself at most, 128 times as much as one of float16, and so are the
    scores. Kernels and references agree far better than that."""
    folder = checkpoint(tmp_path, k_scale, v_scale)
    kinds = (("cpu", "f32"), ("cpu", "f16"), ("cpu", "fp8"), ("reference", "fp8"))
    entries = [scored(folder, *kind) for kind in kinds]
    likely = [[i for i, _ in e.top[:8]] for e in entries[0]]
    exact, halves, ours, reference = (
        np.array(
            [[dict(e.top).get(i, e.top[-1][1]) for i in best] for e, best in zip(run, likely, strict=True)]
        )
        for run in entries
    )
    by_halves, by_bytes = np.abs(halves - exact).mean(), np.abs(ours - exact).mean()
    assert 16 * by_halves < by_bytes < 256 * by_halves
    assert np.abs(ours - reference).mean() < 2e-3


def test_clipping_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scored(checkpoint(tmp_path / "wide", 1.0, 1.0), "cpu", "fp8")
    assert CLIPS not in caplog.text
    folder = checkpoint(tmp_path / "narrow", 1e-3, 1.0)  # keys past 0.448
    with caplog.at_level(logging.WARNING):
        scored(folder, "cpu", "fp8")
    assert caplog.text.count(CLIPS) == 1
    caplog.clear()
    scored(folder, "cpu", "f16")  # whose cache takes no scales
    assert CLIPS not in caplog.text
