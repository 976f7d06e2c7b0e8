"""Scales of an 8-bit KV cache: how checkpoints name them, and where a program takes them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.models.qwen3_5.config import Qwen3_5Config
from pegainfer.models.qwen3_5.forward import forward, groups
from pegainfer.models.qwen3_5.weights import TABLE
from pegainfer.ops.kv_scales import read_kv_scales, with_kv_scales
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.weights.safetensors import open_safetensors
from tests.support.modelfiles import safetensors_file
from tests.support.tinyqwen3_5 import MODELS

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def scales(
    folder: Path, tensors: dict[str, Any], scheme: dict[str, Any] | None = FLOAT8
) -> dict[int, tuple[float, float]]:
    stored = {
        f"model.layers.{name}": ("F32", np.shape(v), np.asarray(v, "<f4").tobytes())
        for name, v in tensors.items()
    }
    (folder / "model.safetensors").write_bytes(safetensors_file(stored))
    config = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}}
    with open_safetensors(folder) as file:
        return read_kv_scales(config, file)


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_names_of_writers(names: tuple[str, str], tmp_path: Path) -> None:
    k, v = names
    given = {f"0.{k}": 0.5, f"0.{v}": [2.0], f"11.{v}": 3.0, "1.self_attn.q_scale": 9.0}
    assert scales(tmp_path, given) == {0: (0.5, 2.0), 11: (1.0, 3.0)}


def test_one_scale_for_both(tmp_path: Path) -> None:
    assert scales(tmp_path, {"3.self_attn.kv_scale": 0.25}) == {3: (0.25, 0.25)}


def test_a_scale_that_is_not_above_zero_is_one(tmp_path: Path) -> None:
    given = {"0.self_attn.k_scale": -1.0, "0.self_attn.v_scale": 2.0, "1.self_attn.k_scale": 0.0}
    assert scales(tmp_path, given) == {0: (1.0, 2.0)}


def test_scales_of_another_cache_format_are_not_for_this_one(tmp_path: Path) -> None:
    given = {"0.self_attn.k_scale": 0.5}
    assert scales(tmp_path, given, {**FLOAT8, "type": "int"}) == {}
    assert scales(tmp_path, given, {**FLOAT8, "num_bits": 4}) == {}
    assert scales(tmp_path, given, None) == {0: (0.5, 1.0)}


def test_a_scale_of_each_head_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert scales(tmp_path, {"0.self_attn.k_scale": [0.5, 0.5], "0.self_attn.v_scale": 4.0}) == {
            0: (1.0, 4.0)
        }
    assert "layers.0.self_attn.k_scale: scales per head are not supported" in caplog.text


def test_a_program_takes_the_scales_of_its_layers() -> None:
    """Every fourth layer of this line has keys, so that its cache counts other numbers."""
    config = Qwen3_5Config.from_hf(MODELS["published_bf16"].hf_config(), "config.json")
    formats = Formats(kv="f8_e4m3")
    names = {n: "bf16" if len(s) > 1 else "f32" for n, s in TABLE.shapes(config).items()}
    sizes = Sizes(groups(config, 16, formats), (4, 4), 64)
    program = forward(config, names, sizes, formats)
    full = [
        int(c.tensors["wk"].name.split(".")[1]) for c in program.calls if "wk" in c.tensors
    ]  # by the checkpoint's count
    given = {layer: (0.5 + layer, 2.0 + layer) for layer in full}
    scaled = with_kv_scales(program, given)
    found = [(c.attrs["k_scale"], c.attrs["v_scale"]) for c in scaled.calls if "k_scale" in c.attrs]
    assert len(found) == 2 * len(full) and len(full) < config.num_layers
    assert found == [given[layer] for layer in full for _ in range(2)]
    assert all(c.attrs == s.attrs for c, s in zip(program.calls, scaled.calls, strict=True)
               if "k_scale" not in c.attrs)  # fmt: skip
