"""Seeded random models of the DeepSeek-V2 family, small enough for a test, written as safetensors.

Golden values made from them stand in tests/data/deepseek_v2; a change here changes them (`make golden`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.tinymodel import VOCAB, Array, Tiny, rounded

TRAINED = 32  # tokens that the stretched models were "trained" for; the texts have 200
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": TRAINED, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": YARN,
    "max_position_embeddings": 1280, "attention_bias": False, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
V2 = BASE | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "scoring_func": "softmax",
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
V3 = BASE | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "q_lora_rank": 32, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
CORRECTION = "e_score_correction_bias"


class TinyDeepseek(Tiny):
    """One model; see Tiny. `config` is V2 or V3 with other fields."""

    prefix = ""

    def text_config(self) -> dict[str, Any]:
        return dict(self.config)

    def hf_config(self) -> dict[str, Any]:
        return self.text_config()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        c, p = self.text_config(), f"{self.prefix}model."
        vocab, hidden = c["vocab_size"], c["hidden_size"]
        shapes: dict[str, tuple[int, ...]] = {f"{p}embed_tokens.weight": (vocab, hidden)}
        for i in range(c["num_hidden_layers"]):
            dense = i < c["first_k_dense_replace"]
            parts = attention_shapes(c) | (
                mlp_shapes("mlp.", c, "intermediate_size") if dense else experts_shapes(c)
            )
            for norm in ("input_layernorm", "post_attention_layernorm"):
                parts[f"{norm}.weight"] = (hidden,)
            shapes |= {f"{p}layers.{i}.{name}": shape for name, shape in parts.items()}
        shapes |= {f"{p}norm.weight": (hidden,), f"{self.prefix}lm_head.weight": (vocab, hidden)}
        return shapes | self.unread()

    def unread(self) -> dict[str, tuple[int, ...]]:
        """A tensor of each drafting layer."""
        c = self.text_config()
        first, hidden = c["num_hidden_layers"], c["hidden_size"]
        count = c.get("num_nextn_predict_layers", 0)
        return {
            f"{self.prefix}model.layers.{first + i}.eh_proj.weight": (hidden, 2 * hidden)
            for i in range(count)
        }

    def stored_as(self, name: str) -> str:
        return "f32" if name.endswith(CORRECTION) else self.dtype

    def tensors(self) -> dict[str, Array]:
        rng = np.random.RandomState(self.seed)  # its stream is frozen by NumPy's policy
        found = {}
        for name, shape in self.shapes().items():
            values = self._draw(rng, shape)
            if name.endswith(CORRECTION):
                values = (0.15 * rng.standard_normal(shape)).astype(np.float32)
            found[name] = rounded(values, self.stored_as(name))
        return found


class WithVision(TinyDeepseek):
    """Kimi-K2.5's form: the text model beside a vision tower."""

    prefix = "language_model."

    def hf_config(self) -> dict[str, Any]:
        text = self.text_config() | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
        return {
            "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
            "text_config": text, "vision_config": {"model_type": "moonvit"},
        }  # fmt: skip

    def unread(self) -> dict[str, tuple[int, ...]]:
        return {"vision_tower.patch_embed.weight": (8, 12), "mm_projector.proj.weight": (64, 8)}


def attention_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank, narrow = (
        c[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    kept, turned, values = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q = heads * (kept + turned)
    if narrow:
        queries: dict[str, tuple[int, ...]] = {
            "self_attn.q_a_proj.weight": (narrow, hidden),
            "self_attn.q_a_layernorm.weight": (narrow,),
            "self_attn.q_b_proj.weight": (q, narrow),
        }
    else:
        queries = {"self_attn.q_proj.weight": (q, hidden)}
    return queries | {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + turned, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (kept + values), rank),
        "self_attn.o_proj.weight": (hidden, heads * values),
    }


def mlp_shapes(prefix: str, c: Mapping[str, Any], width: str, times: int = 1) -> dict[str, tuple[int, ...]]:
    hidden, inner = c["hidden_size"], times * c[width]
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def experts_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    count = c["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (count, c["hidden_size"])}
    if c["scoring_func"] == "sigmoid":
        shapes[f"mlp.gate.{CORRECTION}"] = (count,)
    for e in range(count):
        shapes |= mlp_shapes(f"mlp.experts.{e}.", c, "moe_intermediate_size")
    if c["n_shared_experts"]:
        shapes |= mlp_shapes("mlp.shared_experts.", c, "moe_intermediate_size", c["n_shared_experts"])
    return shapes


KIMI = V3 | {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0, "num_nextn_predict_layers": 0, "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "rope_scaling": YARN | {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
TRUE_HEADS = V2 | {
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_hidden_layers": 2,
}  # fmt: skip
MODELS = {
    m.name: m
    for m in (
        TinyDeepseek("lite_bf16", seed=101, dtype="bf16", config=V2),
        TinyDeepseek(
            "grouped_f32_shards", seed=102, shards=3,
            config=V2 | {
                "q_lora_rank": 40, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                "num_experts_per_tok": 2, "routed_scaling_factor": 16.0, "rope_scaling": None,
                "num_hidden_layers": 2, "qk_nope_head_dim": 18, "qk_rope_head_dim": 6,
            },
        ),
        TinyDeepseek("true_heads_f16", seed=103, dtype="f16", config=TRUE_HEADS),
        TinyDeepseek("true_heads_bf16", seed=106, dtype="bf16", config=TRUE_HEADS),
        TinyDeepseek("v3_bf16", seed=104, dtype="bf16", config=V3),
        TinyDeepseek("kimi_text_f32", seed=105, config=KIMI),
    )
}  # fmt: skip
# Read as the model of the same values that has no vision tower.
KIMI_WITH_VISION = WithVision("kimi_vision_f32", seed=105, config=KIMI)
