"""What Qwen3_5Config takes and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.models.qwen3_5.config import FULL, LINEAR, Qwen3_5Config
from tests.support.tinyqwen3_5 import GGUF_MODELS, MODELS, ROPE, TEXT, TRAINED, YARN, gguf_metadata

# The published config of Qwen3.5-4B, without what concerns images.
QWEN3_5_4B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 8,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24, "hidden_size": 1024},
}


def nested(**fields: Any) -> Qwen3_5Config:
    text = {k: v for k, v in (TEXT | fields).items() if v is not ...}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    return Qwen3_5Config.from_hf(config, "here/config.json")


def flat(**fields: Any) -> Qwen3_5Config:
    text = {k: v for k, v in (TEXT | fields).items() if v is not ...}
    return Qwen3_5Config.from_hf({"architectures": ["Qwen3_5ForCausalLM"]} | text, "here/config.json")


def test_both_forms_say_the_same() -> None:
    assert nested() == flat()
    assert nested() == Qwen3_5Config(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        layer_types=(LINEAR, FULL, LINEAR, FULL, LINEAR),
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rotary_dim=8,
        delta_key_heads=2,
        delta_heads=4,
        delta_key_dim=16,
        delta_dim=16,
        conv_width=4,
        norm_eps=1e-6,
        rope_theta=10000000.0,
        rope_scaling=None,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )


def test_the_published_config() -> None:
    c = Qwen3_5Config.from_hf(QWEN3_5_4B, "config.json")
    assert (c.num_layers, c.num_linear_layers, c.num_full_layers) == (32, 24, 8)
    assert (c.q_size, c.gated_q_size, c.kv_size, c.rotary_dim) == (4096, 8192, 1024, 64)
    assert (c.conv_size, c.delta_size) == (8192, 4096)
    assert (c.max_position_embeddings, c.rope_theta, c.tie_word_embeddings) == (262144, 1e7, True)


def test_the_text_models_own_word_on_tying_counts() -> None:
    def tied(top: bool, **text: Any) -> bool:
        without = {k: v for k, v in TEXT.items() if k != "tie_word_embeddings"}
        config = {"tie_word_embeddings": top, "text_config": without | text}
        return Qwen3_5Config.from_hf(config, "config.json").tie_word_embeddings

    assert tied(True) and not tied(False)
    assert tied(False, tie_word_embeddings=True) and not tied(True, tie_word_embeddings=False)
    assert not flat(tie_word_embeddings=...).tie_word_embeddings


def test_defaults_are_those_of_transformers() -> None:
    c = nested(
        head_dim=...,
        linear_key_head_dim=...,
        linear_value_head_dim=...,
        linear_conv_kernel_dim=...,
        full_attention_interval=...,
        num_hidden_layers=8,
        rms_norm_eps=...,
        max_position_embeddings=...,
        rope_parameters=...,
    )
    assert (c.head_dim, c.rotary_dim, c.delta_key_dim, c.delta_dim, c.conv_width) == (256, 64, 128, 128, 4)
    assert (c.norm_eps, c.max_position_embeddings, c.rope_theta) == (1e-6, 32768, 10000.0)
    assert [i for i, kind in enumerate(c.layer_types) if kind == FULL] == [3, 7]


def test_the_share_that_is_rotated() -> None:
    flat_key = {k: v for k, v in ROPE.items() if k != "partial_rotary_factor"}
    assert nested(rope_parameters=flat_key, partial_rotary_factor=0.5).rotary_dim == 16
    assert nested(rope_parameters=flat_key).rotary_dim == 8  # a quarter, where nothing is said
    assert nested(rope_parameters={**ROPE, "partial_rotary_factor": 1.0}).rotary_dim == 32


def test_yarn_reaches_further_than_the_file_says() -> None:
    c = nested(rope_parameters={**ROPE, **YARN}, max_position_embeddings=TRAINED)
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": float(TRAINED)}
    assert (c.rope_scaling, c.max_position_embeddings) == (wanted, 4 * TRAINED)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is missing; at here/config.json"),
        ({"linear_num_key_heads": ...}, "linear_num_key_heads is missing"),
        ({"num_key_value_heads": 3}, "expected a divisor of the 4 query heads; got 3"),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads is wrong; expected a multiple of 2 key heads",
        ),
        ({"layer_types": [FULL, LINEAR]}, "layer_types is wrong; expected one for each of 5 layers"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is wrong"),
        (
            {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.1}},
            "partial_rotary_factor is wrong; expected a share of 32 that is an even number",
        ),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        nested(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "qwen3_5: text_config: attention_bias is not supported; expected false"),
        ({"attn_output_gate": False}, "attn_output_gate is not supported; expected true"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is not supported; expected swish"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is not supported; expected float32"),
        ({"hidden_act": "gelu"}, "hidden_act is not supported"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config: quant_method is not supported; expected awq, gptq, fp8, fbgemm_fp8 or",
        ),
        ({"layer_types": [FULL] * 5}, "layer_types is not supported"),
        ({"layer_types": [FULL, LINEAR, "sliding_attention", FULL, LINEAR]}, "layer_types is not supported"),
        ({"head_dim": 512}, "expected an even head size ≤ 256; got 512"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "expected default or yarn; got 'llama3'"),
    ],
)
def test_features_of_other_models_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        nested(**fields)
    assert message in str(error.value)


def test_every_tiny_model_is_read() -> None:
    for model in MODELS.values():
        Qwen3_5Config.from_hf(model.hf_config(), "config.json")


def gguf(**fields: Any) -> Qwen3_5Config:
    changed = {f"qwen35.{k.replace('__', '.')}": v for k, v in fields.items()}
    metadata = gguf_metadata(GGUF_MODELS["gguf_q8_0"][0]) | changed
    metadata = {k: v for k, v in metadata.items() if v is not ...}
    return Qwen3_5Config.from_gguf(metadata, "here.gguf", vocab_size=160, tied=True)


def test_gguf_says_the_same_but_for_the_order_of_value_heads() -> None:
    assert gguf() == replace(flat(), tiled_heads=True, draft_layers=1)
    assert gguf(nextn_predict_layers=..., block_count=5) == replace(gguf(), draft_layers=0)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"ssm__group_count": ...}, ConfigError, "qwen35.ssm.group_count is missing; at here.gguf"),
        ({"ssm__time_step_rank": 3}, ConfigError, "expected a multiple of 2; got 3"),
        ({"ssm__inner_size": 65}, ConfigError, "expected a multiple of 4; got 65"),
        ({"rope__dimension_count": 7}, ConfigError, "expected even, at most 32; got 7"),
        ({"block_count": 2}, ConfigError, "block_count is wrong; expected enough for both kinds of layers"),
        ({"attention__value_length": 8}, UnsupportedError, "expected the head size 32; got 8"),
        ({"ssm__dt_b_c_rms": True}, UnsupportedError, "qwen35.ssm.dt_b_c_rms is not supported"),
    ],
)
def test_gguf_metadata_is_checked_alike(fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        gguf(**fields)
    assert message in str(error.value)
