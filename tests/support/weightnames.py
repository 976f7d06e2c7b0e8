"""Hugging Face's names of a decoder's weights in the words of our forwards."""

from __future__ import annotations

FIXED = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "lm_head"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "wq",
    "self_attn.k_proj": "wk",
    "self_attn.v_proj": "wv",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "wo",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "w_gate",
    "mlp.up_proj": "w_up",
    "mlp.down_proj": "w_down",
}


def our_name(name: str) -> str:
    if name in FIXED:
        return FIXED[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"layers.{layer}.{IN_LAYER[part]}"
