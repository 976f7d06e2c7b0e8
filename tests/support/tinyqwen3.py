"""Seeded random Qwen3 models, small enough for a test, written as safetensors or GGUF.

Golden values made from them stand in tests/data/qwen3; a change here changes them (`make golden`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pegainfer.ops.quantize import quantize
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes
from tests.support.tinymodel import Tiny, by_role, gguf_name

# The head size is no quotient of the width and the heads: 4 · 32 = 128 ≠ 64.
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
TRAINED = 64  # tokens that the stretched models were "trained" for; the texts have 200
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}


class TinyQwen3(Tiny):
    """One model; see Tiny."""

    def hf_config(self) -> dict[str, Any]:
        base = super().hf_config() | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
        }
        return base | dict(self.config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.hf_config()
        norms = {
            f"model.layers.{i}.self_attn.{part}_norm.weight": (c["head_dim"],)
            for i in range(c["num_hidden_layers"])
            for part in "qk"
        }
        return super().shapes() | norms


MODELS = {
    m.name: m
    for m in (
        TinyQwen3("tied_bf16", seed=31, dtype="bf16"),
        TinyQwen3(
            "untied_f32_shards",
            seed=32,
            shards=3,
            config={"tie_word_embeddings": False, "num_attention_heads": 6, "head_dim": 16},
        ),
        TinyQwen3(
            "yarn_f16",
            seed=33,
            dtype="f16",
            config={"rope_scaling": YARN, "max_position_embeddings": TRAINED},
        ),
        TinyQwen3(
            "yarn_given_f32",
            seed=34,
            config={
                "rope_scaling": {**YARN, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
                "num_key_value_heads": HEADS,
                "rope_theta": 10000.0,
            },
        ),
    )
}

# name -> (model, storage format of a matrix by its GGUF name)
GGUF_MODELS: dict[str, tuple[TinyQwen3, Callable[[str], str]]] = {
    "gguf_q4_1": (TinyQwen3("gguf_q4_1", seed=41), by_role("q8_0", "q4_1", "q4_1")),
    "gguf_q8_0_untied": (
        TinyQwen3("gguf_q8_0_untied", seed=42, config={"tie_word_embeddings": False}),
        by_role("q8_0", "q8_0", "q8_0"),
    ),
    "gguf_f16_yarn": (
        TinyQwen3("gguf_f16_yarn", seed=43, config={"rope_scaling": YARN}),
        by_role("f16", "f16", "bf16"),
    ),
}


def gguf_metadata(model: TinyQwen3) -> dict[str, Any]:
    """What llama.cpp's converter writes of a Qwen3 config."""
    c = model.hf_config()
    metadata: dict[str, Any] = {
        "general.architecture": "qwen3",
        "qwen3.block_count": c["num_hidden_layers"],
        "qwen3.context_length": c["max_position_embeddings"],
        "qwen3.embedding_length": c["hidden_size"],
        "qwen3.feed_forward_length": c["intermediate_size"],
        "qwen3.attention.head_count": c["num_attention_heads"],
        "qwen3.attention.head_count_kv": c["num_key_value_heads"],
        "qwen3.attention.key_length": c["head_dim"],
        "qwen3.attention.value_length": c["head_dim"],
        "qwen3.attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "qwen3.rope.freq_base": c["rope_theta"],
    }
    if scaling := c.get("rope_scaling"):
        metadata |= {
            "qwen3.rope.scaling.type": "yarn",
            "qwen3.rope.scaling.factor": scaling["factor"],
            "qwen3.rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        }
    return metadata


def gguf_tensors(model: TinyQwen3, formats: Callable[[str], str]) -> list[GGUFTensor]:
    """The model's tensors as a converter would write them: no row changes its place.

    Args:
        formats: storage format of a matrix by its GGUF name; norms are f32.
    """
    found = []
    for name, values in model.tensors().items():
        target = gguf_name(name)
        form = "f32" if values.ndim == 1 else formats(target)
        found.append(GGUFTensor(target, GGML[form], values.shape, quantize(form, values).tobytes()))
    return found


def write_gguf(
    model: TinyQwen3, path: Path, formats: Callable[[str], str], text: Mapping[str, Any] | None = None
) -> Path:
    """`text`: metadata of a tokenizer."""
    path.write_bytes(gguf_bytes(gguf_metadata(model) | dict(text or {}), gguf_tensors(model, formats)))
    return path
