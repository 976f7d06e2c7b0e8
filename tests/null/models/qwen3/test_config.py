"""What Qwen3Config takes and what it refuses, from both kinds of file."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.models.qwen3.config import Qwen3Config
from tests.support.tinyqwen3 import MODELS, YARN, gguf_metadata

BASE = MODELS["tied_bf16"].hf_config()
# The published config of Qwen3-4B.
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def hf(**fields: Any) -> Qwen3Config:
    config = {k: v for k, v in (BASE | fields).items() if v is not ...}
    return Qwen3Config.from_hf(config, "here/config.json")


def gguf(**fields: Any) -> Qwen3Config:
    changed = {f"qwen3.{k.replace('__', '.')}": v for k, v in fields.items()}
    metadata = {k: v for k, v in (gguf_metadata(MODELS["tied_bf16"]) | changed).items() if v is not ...}
    return Qwen3Config.from_gguf(metadata, "here.gguf", vocab_size=160, tied=True)


def test_both_files_say_the_same() -> None:
    assert hf() == gguf()
    assert hf() == Qwen3Config(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_scaling=None,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


def test_the_published_config() -> None:
    config = Qwen3Config.from_hf(QWEN3_4B, "config.json")
    assert (config.q_size, config.kv_size, config.head_dim, config.hidden_size) == (4096, 1024, 128, 2560)
    assert (config.max_position_embeddings, config.rope_scaling) == (40960, None)


def test_defaults_are_those_of_transformers() -> None:
    config = hf(
        head_dim=...,
        num_key_value_heads=None,
        rms_norm_eps=...,
        rope_theta=...,
        max_position_embeddings=...,
        tie_word_embeddings=...,
    )
    assert (config.head_dim, config.num_kv_heads, config.norm_eps) == (128, 4, 1e-6)
    assert (config.rope_theta, config.max_position_embeddings) == (10000.0, 32768)
    assert config.tie_word_embeddings is False


def test_yarn_in_all_its_spellings() -> None:
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64.0}
    assert hf(rope_scaling=YARN).rope_scaling == wanted
    assert hf(rope_scaling={"type": "yarn", **{k: YARN[k] for k in YARN if k != "rope_type"}}) == hf(
        rope_scaling=YARN
    )
    config = hf(rope_theta=..., rope_parameters={**YARN, "rope_theta": 500000.0, "attention_factor": 1.2})
    assert (config.rope_scaling, config.rope_theta) == ({**wanted, "attention_factor": 1.2}, 500000.0)
    names = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    scaling = {f"rope__scaling__{k}": v for k, v in names.items()}
    assert gguf(**scaling).rope_scaling == wanted
    fast = gguf(**scaling, rope__scaling__yarn_beta_fast=16.0, rope__scaling__yarn_attn_factor=1.0)
    assert fast.rope_scaling == {**wanted, "beta_fast": 16.0}
    assert gguf(rope__scaling__type="none").rope_scaling is None


def test_yarn_reaches_further_than_the_file_says() -> None:
    """Qwen's cards add yarn to a config whose length stays that of the training."""
    assert hf(max_position_embeddings=64, rope_scaling=YARN).max_position_embeddings == 256
    assert hf(max_position_embeddings=1000, rope_scaling=YARN).max_position_embeddings == 1000
    assert hf(max_position_embeddings=64).max_position_embeddings == 64
    without = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    assert hf(max_position_embeddings=80, rope_scaling=without).max_position_embeddings == 320


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is missing; at here/config.json"),
        ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"num_key_value_heads": 3}, "expected a divisor of the 4 query heads; got 3"),
        ({"head_dim": "128"}, "head_dim is wrong; expected an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is wrong"),
        ({"layer_types": "full_attention"}, "layer_types is wrong; expected a list of strings"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling: factor is missing"),
        (
            {"rope_scaling": {**YARN, "factor": 0.5}},
            "rope scaling: factor is wrong; expected a number from 1",
        ),
        (
            {"rope_scaling": {**YARN, "beta_fast": 1}},
            "beta_fast is wrong; expected above beta_slow 1.0; got 1",
        ),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate is wrong; expected true or false"),
        ({"rope_scaling": {**YARN, "attention_factor": -1}}, "attention_factor is wrong"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        hf(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "qwen3: attention_bias is not supported; expected false; got True"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is not supported; expected full_attention in all layers",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is not supported"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config: quant_method is not supported; expected awq, gptq, fp8, fbgemm_fp8 or",
        ),
        ({"head_dim": 512}, "expected an even head size ≤ 256; got 512"),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            "rope_type is not supported; expected default or yarn; got 'llama3'",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
    ],
)
def test_features_of_other_models_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        hf(**fields)
    assert message in str(error.value)


YARN_GGUF = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"embedding_length": ...}, ConfigError, "qwen3.embedding_length is missing; at here.gguf"),
        ({"attention__layer_norm_rms_epsilon": ...}, ConfigError, "rms_epsilon is missing"),
        ({"attention__value_length": 8}, UnsupportedError, "expected the head size 32; got 8"),
        ({"pooling_type": 3}, UnsupportedError, "qwen3.pooling_type is not supported"),
        ({"rope__scaling__type": "linear"}, UnsupportedError, "expected default or yarn; got 'linear'"),
        (YARN_GGUF, ConfigError, "qwen3.rope.scaling.original_context_length is missing"),
        (
            {**YARN_GGUF, "rope__scaling__original_context_length": 64, "rope__scaling__attn_factor": 1.2},
            UnsupportedError,
            "qwen3.rope.scaling.attn_factor is not supported; expected 1.0; got 1.2",
        ),
    ],
)
def test_gguf_metadata_is_checked_alike(fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        gguf(**fields)
    assert message in str(error.value)
