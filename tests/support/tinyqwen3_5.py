"""Seeded random Qwen3.5 models, small enough for a test, written as safetensors or GGUF.

Golden values made from them stand in tests/data/qwen3_5; a change here changes them (`make golden`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.ops.quantize import quantize
from pegainfer.runtime.weights.dequant import dequantize
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes
from tests.support.tinymodel import VOCAB, Tiny, by_role, rounded

Array = np.ndarray[Any, Any]

TRAINED = 64  # tokens that the stretched model was "trained" for; the texts have 200
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
ROPE = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
VISION = {
    "model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
    "in_channels": 3, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 4, "out_hidden_size": 64, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
TEXT = {
    "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 5, "full_attention_interval": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "attn_output_gate": True,
    "attention_bias": False, "hidden_act": "silu", "mamba_ssm_dtype": "float32", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "rope_parameters": ROPE,
}  # fmt: skip


class TinyQwen3_5(Tiny):
    """One model; see Tiny. `config` replaces fields of the text model's config."""

    prefix = "model.language_model."

    def text_config(self) -> dict[str, Any]:
        text = TEXT | dict(self.config)
        layers, interval = text["num_hidden_layers"], text["full_attention_interval"]
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        return {"layer_types": kinds} | text

    def hf_config(self) -> dict[str, Any]:
        """As published: the text model beside a vision tower."""
        text = self.text_config()
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text, "vision_config": VISION,
        }  # fmt: skip

    def unread(self) -> dict[str, tuple[int, ...]]:
        """Some tensors of the vision tower and of the draft head."""
        hidden = self.text_config()["hidden_size"]
        return {
            "model.visual.pos_embed.weight": (4, 16),
            "model.visual.blocks.0.attn.qkv.bias": (48,),
            "mtp.fc.weight": (hidden, 2 * hidden),
            "mtp.layers.0.self_attn.q_norm.weight": (32,),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.text_config()
        hidden, p = c["hidden_size"], self.prefix
        shapes: dict[str, tuple[int, ...]] = {p + "embed_tokens.weight": (c["vocab_size"], hidden)}
        for i, kind in enumerate(c["layer_types"]):
            mixer = full_shapes(c) if kind == "full_attention" else linear_shapes(c)
            layer = {
                "input_layernorm.weight": (hidden,),
                **mixer,
                "post_attention_layernorm.weight": (hidden,),
                **self.feed_forward_shapes(c),
            }
            shapes |= {f"{p}layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes[p + "norm.weight"] = (hidden,)
        if not c["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (c["vocab_size"], hidden)
        return shapes | self.unread()

    def feed_forward_shapes(self, c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        return {
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }

    def stored_as(self, name: str) -> str:
        return "f32" if name.endswith(("A_log", "linear_attn.norm.weight")) else self.dtype

    def tensors(self) -> dict[str, Array]:
        rng = np.random.RandomState(self.seed)  # its stream is frozen by NumPy's policy
        values = {name: _values(name, shape, rng) for name, shape in self.shapes().items()}
        return {name: rounded(v, self.stored_as(name)) for name, v in values.items()}


class TextOnly(TinyQwen3_5):
    """A save of the text model alone: a flat config, names without `language_model`."""

    prefix = "model."

    def hf_config(self) -> dict[str, Any]:
        return {"architectures": ["Qwen3_5ForCausalLM"]} | self.text_config()

    def unread(self) -> dict[str, tuple[int, ...]]:
        return {}


def full_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj.weight": (2 * q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "self_attn.o_proj.weight": (hidden, q),
    }


def linear_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, dim = c["hidden_size"], c["linear_num_value_heads"], c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + heads * dim
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (heads * dim, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, c["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (dim,),
        "linear_attn.out_proj.weight": (hidden, heads * dim),
    }


def _values(name: str, shape: tuple[int, ...], rng: np.random.RandomState) -> Array:
    """States forget half of themselves in one to a hundred tokens; no norm's factor is one."""
    if name.endswith("A_log"):
        found = np.log(rng.uniform(0.05, 6.0, shape))
    elif name.endswith("dt_bias"):
        found = rng.standard_normal(shape) - 1
    elif name.endswith("linear_attn.norm.weight"):
        found = 1 + 0.2 * rng.standard_normal(shape)
    elif len(shape) == 1:
        found = 0.3 * rng.standard_normal(shape)  # the factor is 1 + w
    elif name.endswith("conv1d.weight"):
        found = 0.6 * rng.standard_normal(shape)
    else:
        found = rng.standard_normal(shape) * (1.5 / np.sqrt(shape[-1]))
    return found.astype(np.float32)


MODELS: dict[str, TinyQwen3_5] = {
    m.name: m
    for m in (
        TinyQwen3_5("published_bf16", seed=51, dtype="bf16"),
        # The head sizes of real models, for which kernels on GPUs are made.
        TinyQwen3_5(
            "true_heads_bf16",
            seed=52,
            dtype="bf16",
            config={
                "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
                "full_attention_interval": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
                "head_dim": 256, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
                "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": False,
            },
        ),
        # Keys and values of different sizes, three value heads a key head, layers in an order of their own.
        TextOnly(
            "text_only_f32_shards",
            seed=53,
            shards=3,
            config={
                "num_hidden_layers": 4, "tie_word_embeddings": False, "linear_num_value_heads": 6,
                "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3,
                "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
                "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
            },
        ),
        TextOnly(
            "yarn_f16",
            seed=54,
            dtype="f16",
            config={"rope_parameters": {**ROPE, **YARN}, "max_position_embeddings": TRAINED},
        ),
    )
}  # fmt: skip

# name -> (model, storage format of a matrix by its GGUF name)
GGUF_MODELS: dict[str, tuple[TinyQwen3_5, Callable[[str], str]]] = {
    "gguf_q8_0": (TextOnly("gguf_q8_0", seed=61), by_role("q8_0", "q8_0", "q8_0")),
    # Three value heads a key head, so that one order of them is not the other's inverse.
    "gguf_q4_1_untied": (
        TextOnly(
            "gguf_q4_1_untied",
            seed=62,
            config={
                "tie_word_embeddings": False, "linear_num_value_heads": 6, "linear_value_head_dim": 32,
                "num_hidden_layers": 6, "full_attention_interval": 3,
            },
        ),
        by_role("q8_0", "q4_1", "q8_0"),
    ),
}  # fmt: skip
GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
GGUF_FIXED = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """What llama.cpp's converter calls a tensor of a checkpoint."""
    if name in GGUF_FIXED:
        return GGUF_FIXED[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}"


def gguf_metadata(model: TinyQwen3_5) -> dict[str, Any]:
    c = model.text_config()
    found = {
        "block_count": c["num_hidden_layers"] + 1,  # with the draft head's
        "nextn_predict_layers": 1,
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": c["rope_parameters"]["rope_theta"],
        "rope.dimension_count": int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"]),
        "rope.dimension_sections": np.array([2, 1, 1, 0], np.int32),
        "full_attention_interval": c["full_attention_interval"],
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
    }
    if "intermediate_size" in c:
        found["feed_forward_length"] = c["intermediate_size"]
    return {"general.architecture": "qwen35"} | {f"qwen35.{k}": v for k, v in found.items()}


def value_channels(model: TinyQwen3_5, name: str) -> tuple[int, int, int] | None:
    """(axis, first entry, entries of one head) of what a tensor holds for each value head; None: nothing."""
    c = model.text_config()
    keys = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    dim = c["linear_value_head_dim"]
    places = {
        "in_proj_qkv.weight": (0, keys, dim), "conv1d.weight": (0, keys, dim),
        "in_proj_z.weight": (0, 0, dim), "out_proj.weight": (1, 0, dim), "in_proj_a.weight": (0, 0, 1),
        "in_proj_b.weight": (0, 0, 1), "A_log": (0, 0, 1), "dt_bias": (0, 0, 1),
    }  # fmt: skip
    return places.get(name.partition("linear_attn.")[2])


def reordered(model: TinyQwen3_5, name: str, values: Array, *, tiled: bool) -> Array:
    """Value heads into llama.cpp's order, the first of each key head first; or back to that of key heads."""
    place = value_channels(model, name)
    if place is None:
        return values
    axis, first, dim = place
    c = model.text_config()
    keys, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    sizes = (keys, heads // keys) if tiled else (heads // keys, keys)
    rest, own = np.split(np.moveaxis(values, axis, 0), [first])
    own = own.reshape(*sizes, dim, *own.shape[1:]).swapaxes(0, 1).reshape(own.shape)
    return np.ascontiguousarray(np.moveaxis(np.concatenate([rest, own]), 0, axis))


def has_one_added(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def gguf_tensors(model: TinyQwen3_5, formats: Callable[[str], str]) -> list[GGUFTensor]:
    """The model's tensors as a converter would write them, and one of the draft head.

    Args:
        formats: storage format of a matrix by its GGUF name; vectors and the convolution are f32.
    """
    layers = model.text_config()["num_hidden_layers"]
    found = [GGUFTensor(f"blk.{layers}.nextn.enorm.weight", GGML["f32"], (64,), bytes(256))]
    for name, values in model.tensors().items():
        stored = reordered(model, name, values, tiled=True)
        if has_one_added(name):
            stored = 1 + stored
        elif name.endswith("A_log"):
            stored = -np.exp(stored)
        elif name.endswith(("conv1d.weight", "shared_expert_gate.weight")):
            stored = stored.squeeze()  # of the axis of one entry
        form = form_of(name, formats)
        data = quantize(form, np.ascontiguousarray(stored)).tobytes()
        found.append(GGUFTensor(gguf_name(name), GGML[form], stored.shape, data))
    return found


def form_of(name: str, formats: Callable[[str], str]) -> str:
    matrices = ("proj.weight", "experts.gate_up_proj", "experts.down_proj", "embed_tokens.weight")
    matrix = name.endswith((*matrices, "lm_head.weight")) or "in_proj" in name
    return formats(gguf_name(name)) if matrix else "f32"


def file_values(model: TinyQwen3_5, formats: Callable[[str], str]) -> dict[str, Array]:
    """Float32 values that a GGUF file of these formats holds, by Hugging Face's names and in their order."""
    found = model.tensors()
    for name, values in found.items():
        if (form := form_of(name, formats)) != "f32":
            tiled = reordered(model, name, values, tiled=True)
            stored = dequantize(form, quantize(form, tiled), tiled.shape)
            found[name] = reordered(model, name, stored, tiled=False)
    return found


def write_gguf(model: TinyQwen3_5, path: Path, formats: Callable[[str], str]) -> Path:
    path.write_bytes(gguf_bytes(gguf_metadata(model), gguf_tensors(model, formats)))
    return path
