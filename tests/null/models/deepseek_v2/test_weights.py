"""Names, shapes and values of the family's weights from both kinds of file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError
from pegainfer.models.deepseek_v2.config import DeepseekV2Config
from pegainfer.models.deepseek_v2.weights import DeepseekV2Weights, load_gguf, load_safetensors
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.safetensors import open_safetensors
from tests.support.deepseekgguf import write_gguf
from tests.support.modelfiles import safetensors_file
from tests.support.tinydeepseek import KIMI_WITH_VISION, MODELS, TinyDeepseek
from tests.support.tinymodel import Array, raw_bytes, write_checkpoint


def from_checkpoint(folder: Path) -> DeepseekV2Weights:
    config = DeepseekV2Config.from_hf(json.loads((folder / "config.json").read_text()), "config.json")
    return load_safetensors(config, open_safetensors(folder))


def wanted(model: TinyDeepseek, layer: int) -> dict[str, Array]:
    """Attention's arranged weights of a layer, element by element from the stored ones."""
    c, stored = model.text_config(), model.tensors()
    heads, kept, turned = (c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    rank, values = c["kv_lora_rank"], c["v_head_dim"]
    at = f"{model.prefix}model.layers.{layer}.self_attn."
    query = stored[at + ("q_b_proj.weight" if c["q_lora_rank"] else "q_proj.weight")]
    latent, kv_b = stored[at + "kv_a_proj_with_mqa.weight"], stored[at + "kv_b_proj.weight"]
    pairs = [*range(0, turned, 2), *range(1, turned, 2)]  # even ones first
    order = [
        h * (kept + turned) + i for h in range(heads) for i in (*range(kept), *(kept + p for p in pairs))
    ]
    found = {"wq": query[order], "w_latent": latent[[*range(rank), *(rank + p for p in pairs)]]}
    w_k, w_v = np.empty((heads, rank, kept), np.float32), np.empty((heads, values, rank), np.float32)
    for h in range(heads):
        rows = kv_b[h * (kept + values) : (h + 1) * (kept + values)]
        w_k[h], w_v[h] = rows[:kept].T, rows[kept:]
    return found | {"w_k": w_k, "w_v": w_v}


@pytest.mark.parametrize("model", [*MODELS.values(), KIMI_WITH_VISION], ids=lambda m: m.name)
def test_a_checkpoint_gives_its_values_arranged(model: TinyDeepseek, tmp_path: Path) -> None:
    tensors = from_checkpoint(write_checkpoint(model, tmp_path)).tensors
    for layer in range(model.text_config()["num_hidden_layers"]):
        for name, values in wanted(model, layer).items():
            weight = tensors[f"layers.{layer}.{name}"]
            np.testing.assert_array_equal(weight.values(), values, err_msg=name)
            assert weight.dtype == model.dtype, "no weight grows as it is arranged"
    stored, experts = model.tensors(), f"{model.prefix}model.layers.1.mlp.experts."
    np.testing.assert_array_equal(tensors["layers.1.w_up"].values()[5], stored[f"{experts}5.up_proj.weight"])
    shared = stored[f"{model.prefix}model.layers.1.mlp.shared_experts.down_proj.weight"]
    np.testing.assert_array_equal(tensors["layers.1.shared_down"].values(), shared)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("name", ["lite_bf16", "v3_bf16"])
def test_gguf_gives_the_same_values(name: str, split: bool, tmp_path: Path) -> None:
    model = MODELS[name]
    expected = from_checkpoint(write_checkpoint(model, tmp_path / "hf")).tensors
    with GGUFFile(write_gguf(model, tmp_path / "m.gguf", lambda _: model.dtype, split=split)) as file:
        tensors = load_gguf(file).tensors
        assert set(tensors) == set(expected)
        for key, weight in expected.items():
            np.testing.assert_array_equal(tensors[key].values(), weight.values(), err_msg=key)


def test_a_quantised_kv_b_is_expanded_for_the_keys_alone(tmp_path: Path) -> None:
    """Blocks run along the latent: values keep them, transposed keys cannot."""
    model = MODELS["lite_bf16"]
    with GGUFFile(write_gguf(model, tmp_path / "m.gguf", lambda _: "q8_0", split=False)) as file:
        tensors = load_gguf(file).tensors
        assert (tensors["layers.0.w_k"].dtype, tensors["layers.0.w_v"].dtype) == ("f32", "q8_0")


def test_a_missing_latent_is_named(tmp_path: Path) -> None:
    model = MODELS["lite_bf16"]
    entries = {n: ("BF16", v.shape, raw_bytes(v, "bf16")) for n, v in model.tensors().items()}
    del entries["model.layers.1.self_attn.kv_b_proj.weight"]
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config()))
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(entries))
    with pytest.raises(ModelFileError, match=r"missing; expected model.layers.1.self_attn.kv_b_proj"):
        from_checkpoint(tmp_path)
