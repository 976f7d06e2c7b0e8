"""Seeded random Qwen3-MoE models, small enough for a test, written as safetensors or GGUF.

Golden values made from them stand in tests/data/qwen3_moe; a change here changes them (`make golden`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.ops.quantize import quantize
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes
from tests.support.tinymodel import Array, by_role, gguf_name
from tests.support.tinyqwen3 import TinyQwen3
from tests.support.tinyqwen3 import gguf_metadata as dense_metadata

EXPERTS, CHOSEN, EXPERT_SIZE = 8, 3, 32


class TinyQwen3Moe(TinyQwen3):
    """One model; see Tiny."""

    def hf_config(self) -> dict[str, Any]:
        base = super().hf_config() | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": EXPERT_SIZE,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        return base | dict(self.config)

    def is_dense(self, layer: int) -> bool:
        c = self.hf_config()
        return layer in c["mlp_only_layers"] or (layer + 1) % c["decoder_sparse_step"] != 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c, shapes = self.hf_config(), super().shapes()
        hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
        for i in range(c["num_hidden_layers"]):
            if self.is_dense(i):
                continue
            mlp = f"model.layers.{i}.mlp."
            for part in ("gate", "up", "down"):
                del shapes[f"{mlp}{part}_proj.weight"]
            shapes[f"{mlp}gate.weight"] = (c["num_experts"], hidden)
            for e in range(c["num_experts"]):
                shapes |= {
                    f"{mlp}experts.{e}.gate_proj.weight": (inner, hidden),
                    f"{mlp}experts.{e}.up_proj.weight": (inner, hidden),
                    f"{mlp}experts.{e}.down_proj.weight": (hidden, inner),
                }
        return shapes


MODELS = {
    m.name: m
    for m in (
        TinyQwen3Moe("all_experts_bf16", seed=61, dtype="bf16"),
        TinyQwen3Moe(
            "one_dense_f32_shards",
            seed=62,
            shards=3,
            config={
                "num_hidden_layers": 3,
                "mlp_only_layers": [1],
                "norm_topk_prob": False,
                "tie_word_embeddings": False,
            },
        ),
        TinyQwen3Moe(
            "every_second_f16",
            seed=63,
            dtype="f16",
            config={
                "num_hidden_layers": 4,
                "decoder_sparse_step": 2,
                "num_experts": 6,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 48,
            },
        ),
        # The head size of real models and widths for tensor cores, for which kernels on GPUs are made.
        TinyQwen3Moe(
            "true_heads_bf16",
            seed=64,
            dtype="bf16",
            config={
                "hidden_size": 256,
                "intermediate_size": 192,
                "num_hidden_layers": 3,
                "mlp_only_layers": [1],
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 64,
                "tie_word_embeddings": False,
            },
        ),
    )
}


def with_router(formats: Callable[[str], str]) -> Callable[[str], str]:
    """The same formats with routers in float32, as llama.cpp's converter writes them."""
    return lambda name: "f32" if "ffn_gate_inp" in name else formats(name)


# name -> (model, storage format of a matrix by its GGUF name)
GGUF_MODELS: dict[str, tuple[TinyQwen3Moe, Callable[[str], str]]] = {
    "gguf_q4_1": (TinyQwen3Moe("gguf_q4_1", seed=71), with_router(by_role("q8_0", "q4_1", "q4_1"))),
    "gguf_q8_0_untied": (
        TinyQwen3Moe("gguf_q8_0_untied", seed=72, config={"tie_word_embeddings": False}),
        with_router(by_role("q8_0", "q8_0", "q8_0")),
    ),
    "gguf_bf16": (TinyQwen3Moe("gguf_bf16", seed=73), with_router(by_role("f16", "bf16", "bf16"))),
}


def gguf_metadata(model: TinyQwen3Moe) -> dict[str, Any]:
    """What llama.cpp's converter writes of a Qwen3-MoE config."""
    c = model.hf_config()
    dense = dense_metadata(model) | {"general.architecture": "qwen3moe"}
    renamed = {k.replace("qwen3.", "qwen3moe.", 1): v for k, v in dense.items()}
    return renamed | {
        "qwen3moe.expert_count": c["num_experts"],
        "qwen3moe.expert_used_count": c["num_experts_per_tok"],
        "qwen3moe.expert_feed_forward_length": c["moe_intermediate_size"],
    }


def gguf_tensors(model: TinyQwen3Moe, formats: Callable[[str], str]) -> list[GGUFTensor]:
    """The model's tensors as a converter would write them: experts stacked, no row in another place."""
    stacks: dict[str, list[Array]] = {}
    for name, values in model.tensors().items():
        stacks.setdefault(gguf_name(name), []).append(values)
    found = []
    for target, parts in stacks.items():
        values = np.stack(parts) if target.endswith("_exps.weight") else parts[0]
        form = "f32" if values.ndim == 1 else formats(target)
        found.append(GGUFTensor(target, GGML[form], values.shape, quantize(form, values).tobytes()))
    return found


def write_gguf(
    model: TinyQwen3Moe, path: Path, formats: Callable[[str], str], text: Mapping[str, Any] | None = None
) -> Path:
    """`text`: metadata of a tokenizer."""
    path.write_bytes(gguf_bytes(gguf_metadata(model) | dict(text or {}), gguf_tensors(model, formats)))
    return path
