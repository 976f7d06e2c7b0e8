"""What becomes of a checkpoint's tensors: rows, channels, factors, and tensors that are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.models.qwen3_5.config import FULL, Qwen3_5Config
from pegainfer.models.qwen3_5.weights import TABLE, Qwen3_5Weights, load_gguf, load_safetensors
from pegainfer.ops.weights import without_data
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.safetensors import open_safetensors
from tests.support.modelfiles import safetensors_file
from tests.support.tinymodel import raw_bytes, write_checkpoint
from tests.support.tinyqwen3_5 import MODELS, TinyQwen3_5
from tests.support.tinyqwen3_5moe import MODELS as MOE
from tests.support.tinyqwen3_5moe import MoeTextOnly, write_gguf

Array = np.ndarray[Any, Any]


def from_checkpoint(folder: Path) -> Qwen3_5Weights:
    config = Qwen3_5Config.from_hf(json.loads((folder / "config.json").read_text()), "config.json")
    return load_safetensors(config, open_safetensors(folder))


def rotation_order(c: Qwen3_5Config) -> Array:
    """Rotated pairs (i, i + rotary / 2) half a head apart, the other channels in their order behind them."""
    half = c.rotary_dim // 2
    rest = np.arange(c.rotary_dim, c.head_dim).reshape(2, -1)
    return np.concatenate([np.arange(half), rest[0], np.arange(half, 2 * half), rest[1]])


def wanted(model: TinyQwen3_5, c: Qwen3_5Config) -> dict[str, Array]:
    """The forward's weights, made of the file's tensors by NumPy alone."""
    t = model.tensors()
    p, order = model.prefix, rotation_order(c)
    found = {"embed": t[p + "embed_tokens.weight"], "norm": 1 + t[p + "norm.weight"]}
    if not c.tie_word_embeddings:
        found["lm_head"] = t["lm_head.weight"]
    for i, kind in enumerate(c.layer_types):
        at, to = f"{p}layers.{i}.", f"layers.{i}."
        found[to + "mix_norm"] = 1 + t[at + "input_layernorm.weight"]
        found[to + "mlp_norm"] = 1 + t[at + "post_attention_layernorm.weight"]
        found |= {to + name: values for name, values in feed_forward(t, at + "mlp.", c).items()}
        if kind == FULL:
            a = at + "self_attn."
            q = t[a + "q_proj.weight"].reshape(c.num_heads, 2, c.head_dim, -1)
            k = t[a + "k_proj.weight"].reshape(c.num_kv_heads, c.head_dim, -1)
            found[to + "wq"] = q[:, 0][:, order].reshape(c.q_size, -1)
            found[to + "wg"] = q[:, 1].reshape(c.q_size, -1)
            found[to + "wk"] = k[:, order].reshape(c.kv_size, -1)
            found[to + "q_norm"] = (1 + t[a + "q_norm.weight"])[order]
            found[to + "k_norm"] = (1 + t[a + "k_norm.weight"])[order]
            found |= {to + "wv": t[a + "v_proj.weight"], to + "wo": t[a + "o_proj.weight"]}
        else:
            a = at + "linear_attn."
            for ours in ("qkv", "z", "a", "b"):
                found[to + "w_" + ours] = t[f"{a}in_proj_{ours}.weight"]
            found[to + "taps"] = t[a + "conv1d.weight"][:, 0].T
            found |= {to + "a_log": t[a + "A_log"], to + "dt_bias": t[a + "dt_bias"]}
            found |= {to + "out_norm": t[a + "norm.weight"], to + "w_out": t[a + "out_proj.weight"]}
    return found


def feed_forward(t: dict[str, Array], at: str, c: Qwen3_5Config) -> dict[str, Array]:
    """The forward's weights of the feed-forward block or of the experts, whose tensors' names begin so."""
    kinds = ("gate", "up", "down")
    if not c.num_experts:
        return {f"w_{kind}": t[f"{at}{kind}_proj.weight"] for kind in kinds}
    if at + "experts.gate_up_proj" in t:
        both = t[at + "experts.gate_up_proj"].reshape(c.num_experts, 2, c.expert_size, -1)
        found = {"w_gate": both[:, 0], "w_up": both[:, 1], "w_down": t[at + "experts.down_proj"]}
    else:
        found = {
            f"w_{kind}": np.stack([t[f"{at}experts.{e}.{kind}_proj.weight"] for e in range(c.num_experts)])
            for kind in kinds
        }
    found |= {f"shared_{kind}": t[f"{at}shared_expert.{kind}_proj.weight"][None] for kind in kinds}
    routers = {"w_router": t[at + "gate.weight"], "shared_router": t[at + "shared_expert_gate.weight"]}
    return found | routers


ALL = MODELS | MOE


@pytest.mark.parametrize("model", ALL.values(), ids=ALL.keys())
def test_a_checkpoint_gives_its_values(model: TinyQwen3_5, tmp_path: Path) -> None:
    weights = from_checkpoint(write_checkpoint(model, tmp_path))
    values = wanted(model, weights.config)
    assert set(weights.tensors) == set(values)
    for name, value in values.items():
        found = weights.tensors[name]
        np.testing.assert_array_equal(found.values(), value, err_msg=name)
        converted = value.ndim == 1 or name.endswith("taps")
        assert found.dtype == ("f32" if converted else model.dtype), name


def test_weights_without_data_have_the_same_shapes(tmp_path: Path) -> None:
    weights = from_checkpoint(write_checkpoint(MODELS["true_heads_bf16"], tmp_path))
    made_up = without_data(TABLE, weights.config)
    assert {n: w.shape for n, w in made_up.items()} == {n: w.shape for n, w in weights.tensors.items()}


def test_the_table_rotates_the_first_channels_alone(tmp_path: Path) -> None:
    """A head in the kernels' order, rotated by the table, is the head rotated as transformers does it."""
    weights = from_checkpoint(write_checkpoint(MODELS["published_bf16"], tmp_path))
    c, order = weights.config, rotation_order(weights.config)
    table = weights.cos_sin(100).values()
    assert table.shape == (100, c.head_dim)
    half, pairs = c.rotary_dim // 2, c.head_dim // 2
    x = np.random.RandomState(1).standard_normal(c.head_dim)
    angles = 77 * c.rope_theta ** (-np.arange(half) / half)
    a, b = x[:half], x[half : 2 * half]
    turned = np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles), x[2 * half :]]
    )
    cos, sin = table[77, :pairs], table[77, pairs:]
    first, second = x[order][:pairs], x[order][pairs:]
    ours = np.concatenate([first * cos - second * sin, second * cos + first * sin])
    np.testing.assert_allclose(ours, turned[order], atol=1e-5)


def test_yarns_attention_factor_scales_rotated_channels_alone(tmp_path: Path) -> None:
    weights = from_checkpoint(write_checkpoint(MODELS["yarn_f16"], tmp_path))
    c, table = weights.config, weights.cos_sin(50).values()
    squares = table[:, : c.head_dim // 2] ** 2 + table[:, c.head_dim // 2 :] ** 2
    half = c.rotary_dim // 2
    np.testing.assert_allclose(squares[:, :half], (0.1 * np.log(4.0) + 1) ** 2, rtol=1e-5)
    np.testing.assert_array_equal(squares[:, half:], 1)


def entries(model: TinyQwen3_5) -> dict[str, Any]:
    dtypes = {name: model.stored_as(name) for name in model.shapes()}
    tensors = model.tensors().items()
    return {n: (dtypes[n].upper(), v.shape, raw_bytes(v, dtypes[n])) for n, v in tensors}


def write(model: TinyQwen3_5, folder: Path, tensors: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(model.hf_config()))
    (folder / "model.safetensors").write_bytes(safetensors_file(tensors))
    return folder


def test_a_published_config_with_the_text_models_names_alone(tmp_path: Path) -> None:
    model = MODELS["published_bf16"]
    renamed = {n.replace("language_model.", ""): e for n, e in entries(model).items()}
    weights = from_checkpoint(write(model, tmp_path, renamed))
    np.testing.assert_array_equal(weights.tensors["norm"].values(), wanted(model, weights.config)["norm"])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = MODELS["published_bf16"]
    tensors = entries(model)
    del tensors["model.language_model.layers.2.linear_attn.A_log"]
    match = r"missing; expected model.language_model.layers.2.linear_attn.A_log; got"
    with pytest.raises(ModelFileError, match=match):
        from_checkpoint(write(model, tmp_path, tensors))


@pytest.mark.parametrize("fused", [False, True])
def test_experts_in_gguf(fused: bool, tmp_path: Path) -> None:
    """Gate and up projections as two tensors or one; the shared expert's router is a vector."""
    model = MoeTextOnly("gguf", seed=7)
    path = write_gguf(model, tmp_path / "m.gguf", lambda _: "f32", fused=fused)
    with GGUFFile(path) as file:
        assert ("blk.0.ffn_gate_up_exps.weight" in file.tensors) == fused
        weights, values = load_gguf(file), model.tensors()
        for layer in range(4):
            wanted = feed_forward(values, f"model.layers.{layer}.mlp.", weights.config)
            assert set(wanted) == {
                "w_gate", "w_up", "w_down", "w_router", "shared_gate", "shared_up", "shared_down",
                "shared_router",
            }  # fmt: skip
            for name, value in wanted.items():
                found = weights.tensors[f"layers.{layer}.{name}"].values()
                np.testing.assert_array_equal(found, value, err_msg=name)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model = MOE["moe_one_by_one_f32_shards"]
    tensors = entries(model)
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"missing; expected model.layers.1.mlp.experts.5.up_proj"):
        from_checkpoint(write(model, tmp_path, tensors))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    model = MODELS["published_bf16"]
    tensors = entries(model)
    tensors["model.language_model.layers.1.self_attn.q_proj.bias"] = ("F32", (4,), bytes(16))
    with pytest.raises(UnsupportedError, match=r"qwen3_5 line does not use; .*q_proj.bias"):
        from_checkpoint(write(model, tmp_path, tensors))


def test_sizes_that_contradict_the_config(tmp_path: Path) -> None:
    model = MODELS["published_bf16"]
    tensors = entries(model)
    name = "model.language_model.layers.1.self_attn.q_proj.weight"
    tensors[name] = ("BF16", (128, 64), bytes(2 * 128 * 64))  # as without an output gate
    with pytest.raises(ModelFileError, match=r"q_proj.weight contradicts the config; expected \[256, 64\]"):
        from_checkpoint(write(model, tmp_path, tensors))
