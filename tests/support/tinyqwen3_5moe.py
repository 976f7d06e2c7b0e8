"""Seeded random Qwen3.5-MoE models, small enough for a test, written as safetensors or GGUF.

Golden values made from them stand in tests/data/qwen3_5; a change here changes them (`make golden`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.modelfiles import GGUFTensor, gguf_bytes
from tests.support.tinymodel import by_role
from tests.support.tinyqwen3_5 import VISION, TinyQwen3_5
from tests.support.tinyqwen3_5 import gguf_metadata as base_metadata
from tests.support.tinyqwen3_5 import gguf_tensors as base_tensors

EXPERTS = {
    "model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "full_attention_interval": 4,
    "tie_word_embeddings": False, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip


class TinyQwen3_5Moe(TinyQwen3_5):
    """One model, its experts in stacks, gate and up in one. `config` replaces fields of the text model's."""

    def text_config(self) -> dict[str, Any]:
        found = {**super().text_config(), **EXPERTS, **self.config}
        layers, interval = found["num_hidden_layers"], found["full_attention_interval"]
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        del found["intermediate_size"]
        return {**found, "layer_types": self.config.get("layer_types", kinds)}

    def hf_config(self) -> dict[str, Any]:
        text = self.text_config()
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text,
            "vision_config": {**VISION, "model_type": "qwen3_5_moe_vision"},
        }  # fmt: skip

    def feed_forward_shapes(self, c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        hidden, shared = c["hidden_size"], c["shared_expert_intermediate_size"]
        return {
            "mlp.gate.weight": (c["num_experts"], hidden),
            **self.expert_shapes(c),
            "mlp.shared_expert.gate_proj.weight": (shared, hidden),
            "mlp.shared_expert.up_proj.weight": (shared, hidden),
            "mlp.shared_expert.down_proj.weight": (hidden, shared),
            "mlp.shared_expert_gate.weight": (1, hidden),
        }

    def expert_shapes(self, c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        count, hidden, inner = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
        return {
            "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
            "mlp.experts.down_proj": (count, hidden, inner),
        }


class MoeTextOnly(TinyQwen3_5Moe):
    """A save of the text model alone: a flat config, names without `language_model`."""

    prefix = "model."

    def hf_config(self) -> dict[str, Any]:
        return {"architectures": ["Qwen3_5MoeForCausalLM"]} | self.text_config()

    def unread(self) -> dict[str, tuple[int, ...]]:
        return {}


class OneByOne(MoeTextOnly):
    """The same with each expert's matrices by themselves, as quantised files have them."""

    def expert_shapes(self, c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        return {
            f"mlp.experts.{e}.{name}.weight": shape
            for e in range(c["num_experts"])
            for name, shape in shapes.items()
        }


MODELS: dict[str, TinyQwen3_5Moe] = {
    m.name: m
    for m in (
        TinyQwen3_5Moe("moe_published_bf16", seed=151, dtype="bf16"),
        # The head sizes of real models, for which kernels on GPUs are made.
        TinyQwen3_5Moe(
            "moe_true_heads_bf16",
            seed=152,
            dtype="bf16",
            config={
                "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
                "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
                "linear_value_head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4,
                "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
            },
        ),
        # One expert a token, whose weight is then 1; tied; three value heads a key head.
        OneByOne(
            "moe_one_by_one_f32_shards",
            seed=153,
            shards=3,
            config={
                "num_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 32, "tie_word_embeddings": True,
                "linear_num_value_heads": 6, "num_hidden_layers": 3,
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            },
        ),
    )
}  # fmt: skip

# name -> (model, storage format of a matrix by its GGUF name, whether gate and up are one tensor)
GGUF_MODELS: dict[str, tuple[TinyQwen3_5Moe, Callable[[str], str], bool]] = {
    "moe_gguf_q8_0": (MoeTextOnly("moe_gguf_q8_0", seed=161), by_role("q8_0", "q8_0", "q8_0"), False),
    "moe_gguf_q4_1_fused": (
        MoeTextOnly(
            "moe_gguf_q4_1_fused", seed=162, config={"linear_num_value_heads": 6, "linear_value_head_dim": 32}
        ),
        by_role("q8_0", "q4_1", "q4_1"),
        True,
    ),
}


def gguf_metadata(model: TinyQwen3_5Moe) -> dict[str, Any]:
    """What llama.cpp's converter writes of a Qwen3.5-MoE config."""
    c = model.text_config()
    base = base_metadata(model) | {"general.architecture": "qwen35moe"}
    renamed = {k.replace("qwen35.", "qwen35moe.", 1): v for k, v in base.items()}
    return renamed | {
        "qwen35moe.expert_count": c["num_experts"],
        "qwen35moe.expert_used_count": c["num_experts_per_tok"],
        "qwen35moe.expert_feed_forward_length": c["moe_intermediate_size"],
        "qwen35moe.expert_shared_feed_forward_length": c["shared_expert_intermediate_size"],
    }


def gguf_tensors(
    model: TinyQwen3_5Moe, formats: Callable[[str], str], *, fused: bool = False
) -> list[GGUFTensor]:
    """The model's tensors as a converter would write them.

    Args:
        fused: gate and up projections of experts are one tensor, otherwise two.
    """
    found = []
    for t in base_tensors(model, formats):
        if fused or "gate_up_exps" not in t.name:
            found.append(t)
            continue
        count, rows, width = t.shape
        halves = np.frombuffer(t.data, np.uint8).reshape(count, 2, -1)
        for half, part in enumerate(("gate", "up")):
            name, data = t.name.replace("gate_up", part), np.ascontiguousarray(halves[:, half]).tobytes()
            found.append(GGUFTensor(name, t.kind, (count, rows // 2, width), data))
    return found


def write_gguf(
    model: TinyQwen3_5Moe,
    path: Path,
    formats: Callable[[str], str],
    fused: bool = False,
    text: Mapping[str, Any] | None = None,
) -> Path:
    """`text`: metadata of a tokenizer."""
    metadata = gguf_metadata(model) | dict(text or {})
    path.write_bytes(gguf_bytes(metadata, gguf_tensors(model, formats, fused=fused)))
    return path
