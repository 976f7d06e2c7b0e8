"""What quantization_config of a checkpoint means: which modules, in which scheme; what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ConfigError, ModelFileError, UnsupportedError
from pegainfer.ops.quantization import Quantization, read_quantization
from pegainfer.runtime.weights.fields import Fields
from pegainfer.runtime.weights.safetensors import SafetensorsFile
from tests.support.modelfiles import safetensors_file
from tests.support.packers import KINDS

LAYER = "model.layers.3."


def read(config: dict[str, Any]) -> Quantization:
    found = read_quantization(Fields({"quantization_config": config}, "config.json", line="a line"))
    assert found is not None
    return found


def names(q: Quantization, *modules: str) -> list[str | None]:
    found = [q.scheme_for(m) for m in modules]
    return [None if s is None else s.name for s in found]


def ct(groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **more}


FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def test_a_plain_config_has_none() -> None:
    assert read_quantization(Fields({}, "config.json", line="a line")) is None
    assert read_quantization(Fields({"quantization_config": None}, "config.json", line="a line")) is None


def test_ignored_names_match_whole_and_expressions_from_the_start() -> None:
    ignore = ["lm_head", "re:.*self_attn.*", "re:model.layers.0"]
    q = read(ct({"group_0": {"targets": ["Linear"], "weights": INT4}}, ignore=ignore))
    ignored = ("lm_head", LAYER + "self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.embed_tokens")
    assert names(q, *ignored) == [None] * 4
    kept = (LAYER + "mlp.up_proj", "draft.lm_head", "my.model.layers.0.mlp.up_proj", LAYER + "lm_head_2")
    assert names(q, *kept) == ["ct_int4_32_sym"] * 4
    assert names(q, LAYER + "input_layernorm", "model.norm", LAYER + "self_attn.q_norm") == [None] * 3


def test_groups_of_several_precisions_take_the_first_that_matches() -> None:
    int8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {
        "group_0": {"targets": ["re:.*down_proj", "lm_head"], "weights": int8, "format": "int-quantized"},
        "group_1": {"targets": ["Linear"], "weights": INT4 | {"symmetric": False}},
    }
    q = read(ct(groups, format="mixed-precision") | {"config_groups": groups | {
        "group_1": groups["group_1"] | {"format": "pack-quantized"}}})  # fmt: skip
    modules = (LAYER + "mlp.down_proj", "lm_head", LAYER + "mlp.up_proj")
    assert names(q, *modules) == ["ct_i8_row_sym", "ct_i8_row_sym", "ct_int4_32"]


def test_gptq_overrides_and_skips_modules_by_expressions() -> None:
    dynamic = {
        "-:.*gate_proj": {},
        "+:.*down_proj": {"bits": 8, "group_size": 64},
        ".*up_proj": {"desc_act": True},
    }
    q = read(KINDS["gptq"].config | {"dynamic": dynamic})
    modules = [LAYER + f"mlp.{p}_proj" for p in ("gate", "down", "up")] + [
        LAYER + "self_attn.q_proj",
        "lm_head",
    ]
    assert names(q, *modules) == [None, "gptq8_64_z1", "gptq4_32_z1_ordered", "gptq4_32_z1", None]
    assert names(read(KINDS["gptq"].config | {"lm_head": True}), "lm_head") == ["gptq4_32_z1"]


def test_a_group_of_minus_one_is_a_row_and_has_no_order() -> None:
    q = read(KINDS["gptq"].config | {"group_size": -1, "desc_act": True})
    assert names(q, LAYER + "mlp.up_proj") == ["gptq4_row_z1"]


def test_awq_skips_by_parts_of_names() -> None:
    q = read(KINDS["awq"].config | {"modules_to_not_convert": ["mlp.gate", "self_attn"]})
    modules = (LAYER + "mlp.gate", LAYER + "self_attn.q_proj", LAYER + "mlp.up_proj")
    assert names(q, *modules) == [None, None, "awq_32"]


def test_fp8_scales_are_of_tiles_rows_or_the_matrix() -> None:
    module = LAYER + "mlp.up_proj"
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert names(read(fp8 | {"weight_block_size": [128, 128]}), module) == ["fp8_128x128"]
    assert names(read(fp8), module) == ["fp8_tensor"]
    assert names(read({"quant_method": "fbgemm_fp8"}), module) == ["fp8_row"]
    wanted = {"channel": "fp8_row", "tensor": "fp8_tensor", "block": "fp8_128x64", "group": "fp8_1x128"}
    for strategy, scheme in wanted.items():
        weights = FP8 | {"strategy": strategy, "block_structure": [128, 64], "group_size": 128}
        config = ct({"g": {"targets": ["Linear"], "weights": weights}}, format="float-quantized")
        assert names(read(config), module) == [scheme]


def test_fp8_skips_whole_parts_of_names() -> None:
    """Layer 1 is skipped, and layer 10 is not; so is everything that is called a gate."""
    skipped = ["model.layers.1", "gate", "lm_head"]
    q = read({"quant_method": "fp8", "modules_to_not_convert": skipped[:2], "ignored_layers": skipped[2:]})
    modules = (
        "model.layers.1.mlp.up_proj",
        "model.layers.2.mlp.gate",
        "lm_head",
        "model.layers.2.input_layernorm",
    )
    assert names(q, *modules) == [None] * 4
    assert names(q, "model.layers.10.mlp.up_proj", "model.layers.2.mlp.gate_proj") == ["fp8_tensor"] * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is not supported; expected awq, gptq, fp8,"),
        ({"quant_method": "awq", "version": "gemv"}, "version is not supported; expected gemm; got 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "bits is not supported; expected 4; got 8"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits is not supported; expected 4 or 8; got 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is not"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format is not supported"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int8"}, "pack_dtype is not supported"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"bits": 2}}}, "dynamic: bits is not"),
        (ct({"g": {"targets": ["Linear"], "weights": INT4}}, format="marlin-24"), "got 'marlin-24'"),
        (ct({"g": {"targets": ["Linear"], "weights": INT4}}, format="float-quantized"), "'float-quantized'"),
        (ct({"g": {"targets": ["Linear"], "weights": FP8 | {"num_bits": 4}}}, format="float-quantized"),
         "num_bits is not supported; expected 8"),
        (ct({"g": {"targets": ["Linear"], "weights": FP8 | {"strategy": "token"}}}, format="float-quantized"),
         "strategy is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is not supported; expected e4m3"),
        ({"quant_method": "fp8", "activation_scheme": "block"}, "activation_scheme is not supported"),
        (ct({"g": {"targets": ["Linear"], "weights": INT4 | {"num_bits": 3}}}), "num_bits is not supported"),
        (ct({"g": {"targets": ["Linear"], "weights": INT4 | {"strategy": "block"}}}), "strategy is not"),
        (ct({"g": {"targets": ["Linear"], "weights": INT4}}, sparsity_config={"format": "sparse-24-bitmask"}),
         "sparsity_config is not supported"),
        (ct({"g": {"targets": ["Linear"], "weights": INT4}}, transform_config={"R1": {}}),
         "transform_config is not supported"),
    ],
)  # fmt: skip
def test_what_has_no_decoder_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        read(config)
    assert message in str(error.value)
    assert "a line: quantization_config: " in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": "awq", "group_size": 0}, "group_size is wrong"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is wrong"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is wrong"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(": {}}}, "dynamic is wrong; expected regular"),
        (ct({}), "config_groups is wrong; expected at least one group"),
        (ct({"g": {"targets": ["Linear"]}}), "weights is wrong"),
        (ct({"g": {"targets": ["re:("], "weights": INT4}}), "targets is wrong; expected regular expressions"),
        (ct({"g": {"targets": ["Linear"], "weights": INT4}}, ignore=["re:["]), "ignore is wrong"),
    ],
)
def test_what_cannot_be_right(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(config)
    assert message in str(error.value)


def test_a_bias_beside_quantised_weights_must_be_zero(tmp_path: Path) -> None:
    """AutoGPTQ stores biases of zeros for layers that have none."""
    for value, fine in ((0.0, True), (-0.0, True), (1e-3, False)):
        bias = np.zeros(8, "<f2")
        bias[5] = value
        path = tmp_path / "m.safetensors"
        path.write_bytes(safetensors_file({LAYER + "mlp.up_proj.bias": ("F16", (8,), bias.tobytes())}))
        q = read(KINDS["gptq"].config)
        with SafetensorsFile(path) as file:
            if fine:
                assert LAYER + "mlp.up_proj.bias" in q.unread(file)
            else:
                with pytest.raises(ModelFileError, match=r"up_proj\.bias is a bias"):
                    q.unread(file)
