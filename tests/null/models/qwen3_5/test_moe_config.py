"""What Qwen3_5Config takes and refuses of models with experts, from both kinds of file."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.models.qwen3_5.config import FULL, LINEAR, Qwen3_5Config
from tests.support.tinyqwen3_5moe import GGUF_MODELS, MODELS, MoeTextOnly, gguf_metadata

# The published config of Qwen3.5-35B-A3B, without what concerns images. Qwen3.6-35B-A3B has the same sizes.
QWEN3_5_35B_A3B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152},
}
BASE = MoeTextOnly("base", seed=1)


def hf(**fields: Any) -> Qwen3_5Config:
    text = {k: v for k, v in (BASE.text_config() | fields).items() if v is not ...}
    return Qwen3_5Config.from_hf({"text_config": text}, "here/config.json")


def gguf(**fields: Any) -> Qwen3_5Config:
    changed = {f"qwen35moe.{k.replace('__', '.')}": v for k, v in fields.items()}
    metadata = {k: v for k, v in (gguf_metadata(BASE) | changed).items() if v is not ...}
    return Qwen3_5Config.from_gguf(metadata, "here.gguf", vocab_size=160, tied=False)


def test_the_published_config() -> None:
    c = Qwen3_5Config.from_hf(QWEN3_5_35B_A3B, "config.json")
    assert (c.num_layers, c.num_linear_layers, c.num_full_layers) == (40, 30, 10)
    assert (c.num_experts, c.experts_per_token, c.expert_size, c.shared_expert_size) == (256, 8, 512, 512)
    assert (c.intermediate_size, c.conv_size, c.kv_size) == (0, 8192, 512)
    assert not c.tie_word_embeddings


def test_all_forms_say_the_same() -> None:
    flat = Qwen3_5Config.from_hf(BASE.hf_config(), "config.json")
    assert hf() == flat
    assert gguf() == replace(flat, tiled_heads=True, draft_layers=1)
    assert (flat.num_experts, flat.experts_per_token) == (8, 3)
    assert (flat.expert_size, flat.shared_expert_size) == (32, 64)


def test_every_tiny_model_is_read() -> None:
    for model in [*MODELS.values(), *(model for model, *_ in GGUF_MODELS.values())]:
        assert Qwen3_5Config.from_hf(model.hf_config(), "config.json").num_experts > 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": ...}, "num_experts is missing; at here/config.json"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is wrong; expected an integer from 1 to 8"),
        ({"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
        ({"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size is missing"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is wrong"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        hf(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob is not supported; expected true"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is not supported; expected experts in every layer"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is not supported; expected 1"),
    ],
)
def test_features_of_other_models_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        hf(**fields)
    assert message in str(error.value)


def test_gguf_metadata_is_checked_alike() -> None:
    with pytest.raises(ConfigError, match=r"qwen35moe.expert_shared_feed_forward_length is missing"):
        gguf(expert_shared_feed_forward_length=...)
    with pytest.raises(ConfigError, match=r"qwen35moe.expert_used_count is wrong"):
        gguf(expert_used_count=9)
    with pytest.raises(UnsupportedError, match=r"qwen35moe.expert_gating_func is not supported"):
        gguf(expert_gating_func=2)
