"""What LlamaConfig takes and what it refuses, from both kinds of file."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.models.llama.config import LlamaConfig
from tests.support.tinymodel import LLAMA3, MODELS, gguf_metadata

BASE = MODELS["tied_f32"].hf_config()


def hf(**fields: Any) -> LlamaConfig:
    config = {k: v for k, v in (BASE | fields).items() if v is not ...}
    return LlamaConfig.from_hf(config, "here/config.json")


def gguf(**fields: Any) -> LlamaConfig:
    metadata = gguf_metadata(MODELS["tied_f32"]) | {
        f"llama.{k.replace('__', '.')}": v for k, v in fields.items()
    }
    metadata = {k: v for k, v in metadata.items() if v is not ...}
    return LlamaConfig.from_gguf(metadata, "here.gguf", vocab_size=160, tied=True)


def test_both_files_say_the_same() -> None:
    assert hf() == gguf()
    assert hf() == LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


def test_defaults_are_those_of_transformers() -> None:
    config = hf(
        num_key_value_heads=...,
        rms_norm_eps=...,
        rope_theta=...,
        max_position_embeddings=None,
        tie_word_embeddings=...,
        hidden_act=...,
    )
    assert (config.num_kv_heads, config.norm_eps, config.rope_theta) == (4, 1e-6, 10000.0)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (2048, False)


def test_rope_scaling_in_all_its_spellings() -> None:
    wanted = {k: float(v) if k != "rope_type" else v for k, v in LLAMA3.items()}
    assert hf(rope_scaling=LLAMA3).rope_scaling == wanted
    parameters = {**LLAMA3, "rope_theta": 500000.0}  # transformers 5
    config = hf(rope_theta=..., rope_parameters=parameters)
    assert (config.rope_scaling, config.rope_theta) == (wanted, 500000.0)
    linear = {"rope_type": "linear", "factor": 4.0}
    assert hf(rope_scaling={"type": "linear", "factor": 4}).rope_scaling == linear
    assert gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).rope_scaling == linear
    assert hf(rope_scaling={"rope_type": "default"}).rope_scaling is None
    assert gguf(rope__scaling__type="none").rope_scaling is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is missing; at here/config.json"),
        ({"hidden_size": "64"}, "hidden_size is wrong; expected an integer from 1"),
        ({"hidden_size": True}, "hidden_size is wrong"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is wrong; expected an integer from 1 to 1024; got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is wrong"),
        ({"vocab_size": -5}, "vocab_size is wrong"),
        ({"hidden_size": 66}, "hidden_size is wrong; expected a multiple of num_attention_heads 4; got 66"),
        ({"num_key_value_heads": 3}, "expected a divisor of the 4 query heads; got 3"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is wrong"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is wrong"),
        ({"rope_theta": "big"}, "rope_theta is wrong"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is wrong; expected true or false; got 1"),
        ({"rope_scaling": [1]}, "rope_scaling is wrong; expected an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling: factor is missing"),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            "expected above low_freq_factor 1.0; got 1.0",
        ),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        hf(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias is not supported; expected false; got True"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is not supported; expected silu; got 'gelu'"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config: quant_method is not supported; expected awq, gptq, fp8, fbgemm_fp8 or",
        ),
        ({"head_dim": 512}, "head_dim is not supported; expected an even head size ≤ 256; got 512"),
        ({"head_dim": 15}, "head_dim is not supported"),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope_type is not supported; expected default, linear or llama3",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
    ],
)
def test_features_of_other_models_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        hf(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"embedding_length": ...}, ConfigError, "llama.embedding_length is missing; at here.gguf"),
        ({"block_count": 2.0}, ConfigError, "llama.block_count is wrong"),
        ({"attention__layer_norm_rms_epsilon": ...}, ConfigError, "rms_epsilon is missing"),
        ({"expert_count": 8}, UnsupportedError, "llama.expert_count is not supported"),
        ({"logit_scale": 0.5}, UnsupportedError, "llama.logit_scale is not supported; expected 1; got 0.5"),
        ({"residual_scale": 0.22}, UnsupportedError, "llama.residual_scale is not supported"),
        ({"embedding_scale": 12.0}, UnsupportedError, "llama.embedding_scale is not supported"),
        ({"attention__scale": 0.01}, UnsupportedError, "llama.attention.scale is not supported"),
        ({"attention__sliding_window": 4096}, UnsupportedError, "llama.attention.sliding_window is not"),
        ({"a_key_of_tomorrow": 1}, UnsupportedError, "llama.a_key_of_tomorrow is not supported"),
        ({"attention__value_length": 8}, UnsupportedError, "expected the head size 16; got 8"),
        ({"rope__dimension_count": 8}, UnsupportedError, "llama.rope.dimension_count is not supported"),
        ({"rope__scaling__type": "yarn"}, UnsupportedError, "rope_type is not supported"),
        ({"rope__scaling__type": 3}, ConfigError, "llama.rope.scaling.type is wrong; expected a string"),
    ],
)
def test_gguf_metadata_is_checked_alike(fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        gguf(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [{"rope__scale_linear": 4.0}, {"rope__scaling__factor": 4.0},
     {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}],
)  # fmt: skip
def test_linear_scaling_under_old_keys(fields: dict[str, Any]) -> None:
    assert gguf(**fields).rope_scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "fields",
    [{"logit_scale": 1.0}, {"attention__sliding_window": 0}, {"expert_count": 0}, {"attention__causal": True},
     {"use_parallel_residual": False}, {"tensor_data_layout": "Meta AI original pth"}],
)  # fmt: skip
def test_keys_that_change_nothing(fields: dict[str, Any]) -> None:
    assert gguf(**fields) == gguf()
