"""Seeded random Qwen3.5 models, small enough for a test, written as safetensors.

Golden values made from them stand in tests/data/qwen3_5; a change here changes them (`make golden`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.tinymodel import VOCAB, Tiny, rounded

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
        hidden, inner, p = c["hidden_size"], c["intermediate_size"], self.prefix
        shapes: dict[str, tuple[int, ...]] = {p + "embed_tokens.weight": (c["vocab_size"], hidden)}
        for i, kind in enumerate(c["layer_types"]):
            mixer = full_shapes(c) if kind == "full_attention" else linear_shapes(c)
            layer = {
                "input_layernorm.weight": (hidden,),
                **mixer,
                "post_attention_layernorm.weight": (hidden,),
                "mlp.gate_proj.weight": (inner, hidden),
                "mlp.up_proj.weight": (inner, hidden),
                "mlp.down_proj.weight": (hidden, inner),
            }
            shapes |= {f"{p}layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes[p + "norm.weight"] = (hidden,)
        if not c["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (c["vocab_size"], hidden)
        return shapes | self.unread()

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
        found = rng.standard_normal(shape) * (1.5 / np.sqrt(shape[1]))
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
