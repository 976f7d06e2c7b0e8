"""Tiny models of the DeepSeek-V2 family as GGUF files: as converters wrote them before llama.cpp cached
latents (kv_b_proj whole) and in the later one (split).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.ops.quantize import quantize
from pegainfer.runtime.weights.dequant import dequantize
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes
from tests.support.tinydeepseek import CORRECTION, V2, V3, TinyDeepseek
from tests.support.tinymodel import EXPERT_NUMBER, GGUF_NAMES, Array, by_role
from tests.support.tinyqwen3moe import with_router

# name -> (model, storage format of a matrix by its GGUF name, whether kv_b_proj is split)
GGUF_MODELS: dict[str, tuple[TinyDeepseek, Callable[[str], str], bool]] = {
    "gguf_fused_q8_0": (
        TinyDeepseek("gguf_fused_q8_0", seed=111, config=V2),
        with_router(by_role("q8_0", "q8_0", "q4_1")), False,
    ),
    "gguf_split_q8_0": (
        TinyDeepseek("gguf_split_q8_0", seed=112, config=V3),
        with_router(by_role("q8_0", "q8_0", "q8_0")), True,
    ),
    "gguf_fused_bf16": (
        TinyDeepseek("gguf_fused_bf16", seed=113, config=V3),
        with_router(by_role("f16", "bf16", "bf16")), False,
    ),
}  # fmt: skip
NAMES = GGUF_NAMES | {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """What llama.cpp's converter calls a tensor of a checkpoint; experts of a layer share a stack's name."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, part = name.split(".", 3)
    if part.endswith(CORRECTION):
        return f"blk.{layer}.exp_probs_b.bias"
    return f"blk.{layer}.{NAMES[EXPERT_NUMBER.sub('experts.', part.removesuffix('.weight'))]}.weight"


def split_keys_values(c: Mapping[str, Any], values: Array) -> dict[str, Array]:
    """kv_b_proj as later converters write it: keys of each head transposed, values as they are."""
    kept, rank = c["qk_nope_head_dim"], c["kv_lora_rank"]
    heads = values.reshape(c["num_attention_heads"], -1, rank)
    return {"attn_k_b": np.ascontiguousarray(heads[:, :kept].swapaxes(1, 2)), "attn_v_b": heads[:, kept:]}


def stored_arrays(model: TinyDeepseek, *, split: bool) -> dict[str, Array]:
    """Tensors by their GGUF names as a converter would arrange them: experts stacked, no drafting layer."""
    stacks: dict[str, list[Array]] = {}
    found: dict[str, Array] = {}
    for name, values in model.tensors().items():
        if name in model.unread():
            continue
        target = gguf_name(name)
        if split and "kv_b" in target:
            parts = split_keys_values(model.text_config(), values)
            found |= {target.replace("attn_kv_b", part): a for part, a in parts.items()}
        elif target.endswith("_exps.weight"):
            stacks.setdefault(target, []).append(values)
        else:
            found[target] = values
    return found | {target: np.stack(parts) for target, parts in stacks.items()}


def file_values(model: TinyDeepseek, formats: Callable[[str], str], *, split: bool) -> dict[str, Array]:
    """Float32 values that a GGUF file of these formats holds, by Hugging Face's names."""
    c, found = model.text_config(), model.tensors()
    for name in [n for n, v in found.items() if v.ndim > 1 and n not in model.unread()]:
        form = formats(gguf_name(name))
        if split and "kv_b" in name:
            parts = split_keys_values(c, found[name])
            keys, values = (as_stored(form, parts[part]) for part in ("attn_k_b", "attn_v_b"))
            both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
            found[name] = np.ascontiguousarray(both.reshape(found[name].shape))
        else:
            found[name] = as_stored(form, found[name])
    return found


def as_stored(form: str, values: Array) -> Array:
    return dequantize(form, quantize(form, values), values.shape)


def gguf_metadata(model: TinyDeepseek, *, split: bool) -> dict[str, Any]:
    """What llama.cpp's converter writes of such a config, before and after it split kv_b_proj."""
    c = model.text_config()
    rank, turned, values = c["kv_lora_rank"], c["qk_rope_head_dim"], c["v_head_dim"]
    scaling, head = c["rope_scaling"], c["qk_nope_head_dim"] + turned
    fields: dict[str, Any] = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "vocab_size": c["vocab_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": 1 if split else c["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned if split else head,
        "attention.value_length": rank if split else values,
        "rope.dimension_count": turned,
        "rope.freq_base": float(c["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_gating_func": 2 if c["scoring_func"] == "sigmoid" else 1,
    }
    if split:
        fields |= {"attention.key_length_mla": head, "attention.value_length_mla": values}
    if c["n_group"] > 1:
        fields |= {"expert_group_count": c["n_group"], "expert_group_used_count": c["topk_group"]}
    if c["q_lora_rank"]:
        fields["attention.q_lora_rank"] = c["q_lora_rank"]
    named = {f"deepseek2.{key}": value for key, value in fields.items()}
    return {"general.architecture": "deepseek2"} | named


def write_gguf(
    model: TinyDeepseek,
    path: Path,
    formats: Callable[[str], str],
    split: bool,
    text: Mapping[str, Any] | None = None,
) -> Path:
    """`text`: metadata of a tokenizer."""
    tensors = []
    for name, values in stored_arrays(model, split=split).items():
        form = "f32" if values.ndim == 1 else formats(name)
        tensors.append(GGUFTensor(name, GGML[form], values.shape, quantize(form, values).tobytes()))
    path.write_bytes(gguf_bytes(gguf_metadata(model, split=split) | dict(text or {}), tensors))
    return path
