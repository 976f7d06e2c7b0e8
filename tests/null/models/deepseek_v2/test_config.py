"""What DeepseekV2Config takes and what it refuses, from both kinds of file."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.models.deepseek_v2.config import DeepseekV2Config
from tests.support.deepseekgguf import GGUF_MODELS, gguf_metadata
from tests.support.tinydeepseek import KIMI, KIMI_WITH_VISION, V2, V3

# The published config of DeepSeek-V2-Lite.
LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}  # fmt: skip


def hf(base: dict[str, Any], **fields: Any) -> DeepseekV2Config:
    config = {k: v for k, v in (base | fields).items() if v is not ...}
    return DeepseekV2Config.from_hf(config, "here/config.json")


def gguf(name: str, **fields: Any) -> DeepseekV2Config:
    model, _, split = GGUF_MODELS[name]
    changed = {f"deepseek2.{k.replace('__', '.')}": v for k, v in fields.items()}
    found = gguf_metadata(model, split=split) | changed
    metadata = {k: v for k, v in found.items() if v is not ...}
    return DeepseekV2Config.from_gguf(metadata, "here.gguf", vocab_size=160, tied=False)


@pytest.mark.parametrize(("name", "base"), [("gguf_fused_q8_0", V2), ("gguf_split_q8_0", V3)])
def test_both_files_say_the_same(name: str, base: dict[str, Any]) -> None:
    found, wanted = gguf(name), hf(base)
    assert found.softmax_scale == pytest.approx(wanted.softmax_scale, rel=1e-12)
    # GGUF has drafting layers dropped and says less of yarn.
    same = {"rope_scaling": None, "draft_layers": 0}
    assert replace(found, **same) == replace(wanted, **same)


def test_the_published_config() -> None:
    c = DeepseekV2Config.from_hf(LITE, "config.json")
    assert (c.head_dim, c.q_size, c.cached_size, c.keys_values_size) == (192, 3072, 576, 4096)
    assert (c.shared_size, c.query_rank, c.max_position_embeddings) == (2816, 0, 163840)
    assert [c.is_dense(i) for i in range(3)] == [True, False, False]
    assert (c.expert_groups, c.kept_groups, c.norm_topk_prob) == (1, 1, False)


@pytest.mark.parametrize(
    ("factor", "mscale", "scale"),
    [(40, 0.707, 0.114721), (40, 1.0, 0.135234), (64, 1.0, 0.144680), (32, 1.0, 0.130861)],
)
def test_the_softmax_scale_of_published_models(factor: int, mscale: float, scale: float) -> None:
    """V2-Lite, V3 and R1, Kimi-K2 in both of its forms: 192^(-1/2) · m(mscale_all_dim)²."""
    yarn = LITE["rope_scaling"] | {"factor": factor, "mscale": mscale, "mscale_all_dim": mscale}
    assert hf(LITE, rope_scaling=yarn).softmax_scale == pytest.approx(scale, abs=5e-7)


def test_without_yarn_the_softmax_scale_is_that_of_the_head() -> None:
    assert hf(LITE, rope_scaling=None).softmax_scale == pytest.approx(192**-0.5)
    yarn = {k: v for k, v in LITE["rope_scaling"].items() if "mscale" not in k}
    assert hf(LITE, rope_scaling=yarn).softmax_scale == pytest.approx(192**-0.5)


def test_greedy_choice_passes_over_groups() -> None:
    grouped = hf(LITE, n_group=8, topk_group=3, topk_method="group_limited_greedy")
    assert (grouped.expert_groups, grouped.kept_groups) == (8, 3)
    greedy = hf(LITE, n_group=8, topk_group=3)
    assert (greedy.expert_groups, greedy.kept_groups) == (1, 1)


def test_a_text_model_beside_a_vision_tower() -> None:
    assert DeepseekV2Config.from_hf(KIMI_WITH_VISION.hf_config(), "config.json") == hf(KIMI)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_routed_experts": ...}, "n_routed_experts is missing"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ({"n_group": 7}, "n_group"),
        ({"n_group": 16, "topk_group": 1}, "topk_group"),
        ({"first_k_dense_replace": 27}, "first_k_dense_replace"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_bad_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf(LITE, **fields)


@pytest.mark.parametrize(
    "fields",
    [{"attention_bias": True}, {"hidden_act": "gelu"}, {"moe_layer_freq": 2}, {"index_topk": 2048},
     {"scoring_func": "sqrtsoftplus"}, {"topk_method": "noaux_tc"}, {"norm_topk_prob": True},
     {"rope_scaling": {"type": "llama3"}}],
    ids=lambda f: next(iter(f)),
)  # fmt: skip
def test_what_the_line_lacks(fields: dict[str, Any]) -> None:
    named = "rope_type" if "rope_scaling" in fields else next(iter(fields))
    with pytest.raises(UnsupportedError, match=f"deepseek_v2.*{named}"):
        hf(LITE, **fields)


def test_gguf_without_what_yarn_needs_and_with_what_is_not_served() -> None:
    with pytest.raises(ConfigError, match="yarn_log_multiplier is missing"):
        gguf("gguf_fused_q8_0", rope__scaling__yarn_log_multiplier=...)
    with pytest.raises(UnsupportedError, match="expert_gating_func"):
        gguf("gguf_fused_q8_0", expert_gating_func=3)
    with pytest.raises(UnsupportedError, match="expert_weights_norm"):
        gguf("gguf_fused_q8_0", expert_weights_norm=True)
    with pytest.raises(UnsupportedError, match="nextn_predict_layers"):
        gguf("gguf_split_q8_0", nextn_predict_layers=1)
    with pytest.raises(ConfigError, match="key_length"):
        gguf("gguf_fused_q8_0", attention__key_length=8)


def test_gguf_of_old_converters_names_no_groups() -> None:
    old = gguf("gguf_split_q8_0", expert_group_count=..., expert_group_used_count=...)
    assert (old.expert_groups, old.kept_groups) == (1, 1)
