"""What Qwen3MoeConfig takes and what it refuses, from both kinds of file."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.models.qwen3_moe.config import Qwen3MoeConfig
from tests.support.tinyqwen3moe import MODELS, gguf_metadata

BASE = MODELS["all_experts_bf16"].hf_config()
# The published config of Qwen3-30B-A3B.
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def hf(**fields: Any) -> Qwen3MoeConfig:
    config = {k: v for k, v in (BASE | fields).items() if v is not ...}
    return Qwen3MoeConfig.from_hf(config, "here/config.json")


def gguf(**fields: Any) -> Qwen3MoeConfig:
    changed = {f"qwen3moe.{k.replace('__', '.')}": v for k, v in fields.items()}
    metadata = {
        k: v for k, v in (gguf_metadata(MODELS["all_experts_bf16"]) | changed).items() if v is not ...
    }
    return Qwen3MoeConfig.from_gguf(metadata, "here.gguf", vocab_size=160, tied=True)


def test_both_files_say_the_same() -> None:
    assert hf() == gguf()
    got = hf()
    assert (got.num_experts, got.experts_per_token, got.expert_size) == (8, 3, 32)
    assert got.norm_topk_prob and not got.dense_layers


def test_the_published_config() -> None:
    config = Qwen3MoeConfig.from_hf(QWEN3_30B_A3B, "config.json")
    assert (config.num_experts, config.experts_per_token, config.expert_size) == (128, 8, 768)
    assert (config.q_size, config.kv_size, config.num_layers) == (4096, 512, 48)
    assert config.norm_topk_prob and not any(config.is_dense(i) for i in range(48))


def test_dense_layers_are_those_named_and_those_between_the_steps() -> None:
    layers = {"num_hidden_layers": 7}
    assert hf(**layers, mlp_only_layers=[1, 4]).dense_layers == {1, 4}
    assert hf(**layers, decoder_sparse_step=3).dense_layers == {0, 1, 3, 4, 6}
    assert hf(**layers, decoder_sparse_step=3, mlp_only_layers=[2]).dense_layers == {0, 1, 2, 3, 4, 6}
    assert hf(**layers, mlp_only_layers=None, decoder_sparse_step=...).dense_layers == set()


def test_defaults_are_those_of_transformers() -> None:
    assert not hf(norm_topk_prob=...).norm_topk_prob
    assert hf(intermediate_size=..., mlp_only_layers=[]).intermediate_size == 6144


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok.*an integer from 1 to 8"),
        ({"num_experts": 0}, "num_experts.*an integer from 1"),
        ({"num_experts": ...}, "num_experts"),
        ({"moe_intermediate_size": ...}, "moe_intermediate_size"),
        ({"mlp_only_layers": [0, 1]}, "mlp_only_layers.*at least one layer with experts"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers.*a list of integers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers.*a list of integers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step.*an integer from 1"),
        ({"decoder_sparse_step": 5}, "at least one layer with experts"),
        ({"norm_topk_prob": 1}, "norm_topk_prob.*true or false"),
        ({"intermediate_size": ..., "mlp_only_layers": [0]}, "intermediate_size"),
    ],
)
def test_bad_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"attention_bias": True}, {"hidden_act": "gelu"}, {"use_sliding_window": True},
     {"quantization_config": {"quant_method": "bitsandbytes"}}, {"layer_types": ["sliding_attention"]}],
    ids=lambda f: next(iter(f)),
)  # fmt: skip
def test_what_the_line_lacks(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"qwen3_moe.*{next(iter(fields))}|{next(iter(fields))}"):
        hf(**fields)


def test_gguf_keys_of_other_routers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="expert_shared_count"):
        gguf(expert_shared_count=1)
    with pytest.raises(UnsupportedError, match="expert_gating_func"):
        gguf(expert_gating_func=2)
    with pytest.raises(ConfigError, match="expert_used_count"):
        gguf(expert_used_count=9)
