"""Names, shapes and values of Qwen3-MoE's weights from both kinds of file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError
from pegainfer.models.qwen3_moe.config import Qwen3MoeConfig
from pegainfer.models.qwen3_moe.weights import Qwen3MoeWeights, load_gguf, load_safetensors
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.safetensors import open_safetensors
from tests.support.modelfiles import safetensors_file
from tests.support.tinymodel import Array, raw_bytes, write_checkpoint
from tests.support.tinyqwen3moe import MODELS, TinyQwen3Moe, write_gguf
from tests.support.weightnames import our_name


def from_checkpoint(folder: Path) -> Qwen3MoeWeights:
    config = Qwen3MoeConfig.from_hf(json.loads((folder / "config.json").read_text()), "config.json")
    return load_safetensors(config, open_safetensors(folder))


def wanted(model: TinyQwen3Moe) -> dict[str, Array]:
    """The forward's weights: those of experts stacked by their numbers."""
    stacks: dict[str, list[Array]] = {}
    plain: dict[str, Array] = {}
    for name, values in model.tensors().items():
        if found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name):
            stack = stacks.setdefault(f"layers.{found[1]}.w_{found[3]}", [])
            assert len(stack) == int(found[2])
            stack.append(values)
        elif found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.gate\.weight", name):
            plain[f"layers.{found[1]}.w_router"] = values
        else:
            plain[our_name(name)] = values
    return plain | {name: np.stack(parts) for name, parts in stacks.items()}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_checkpoint_gives_its_values(model: TinyQwen3Moe, tmp_path: Path) -> None:
    weights, expected = from_checkpoint(write_checkpoint(model, tmp_path)), wanted(model)
    assert set(weights.tensors) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(weights.tensors[name].values(), values, err_msg=name)
        assert weights.tensors[name].dtype == ("f32" if values.ndim == 1 else model.dtype)


def test_gguf_gives_the_same_values(tmp_path: Path) -> None:
    model = MODELS["all_experts_bf16"]
    with GGUFFile(write_gguf(model, tmp_path / "m.gguf", lambda _: model.dtype)) as file:
        weights, expected = load_gguf(file), wanted(model)
        assert set(weights.tensors) == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(weights.tensors[name].values(), values, err_msg=name)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model = MODELS["all_experts_bf16"]
    entries = {n: ("BF16", v.shape, raw_bytes(v, "bf16")) for n, v in model.tensors().items()}
    del entries["model.layers.1.mlp.experts.5.up_proj.weight"]
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config()))
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(entries))
    with pytest.raises(ModelFileError, match=r"missing; expected model.layers.1.mlp.experts.5.up_proj"):
        from_checkpoint(tmp_path)


def test_experts_of_another_size(tmp_path: Path) -> None:
    model = MODELS["all_experts_bf16"]
    folder = write_checkpoint(model, tmp_path)
    (folder / "config.json").write_text(json.dumps(model.hf_config() | {"moe_intermediate_size": 64}))
    with pytest.raises(ModelFileError, match=r"experts.0.gate_proj.weight contradicts the config"):
        from_checkpoint(folder)
