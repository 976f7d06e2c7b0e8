"""The recorded forward: which layers have experts, how they are routed, and in which formats."""

from __future__ import annotations

import pytest

from pegainfer.models.qwen3_moe.config import Qwen3MoeConfig
from pegainfer.models.qwen3_moe.forward import forward, groups, head
from pegainfer.models.qwen3_moe.weights import TABLE
from pegainfer.ops.program import Program
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import Formats, Sizes
from tests.support.tinyqwen3moe import MODELS

ATTENTION = ["qkv_norm_rope_append", "attention", "linear_residual"]
DENSE = [*ATTENTION, "gate_up_swiglu", "linear_residual"]
EXPERTS = [*ATTENTION, "moe", "reduce_residual"]


def config(name: str) -> Qwen3MoeConfig:
    return Qwen3MoeConfig.from_hf(MODELS[name].hf_config(), "config.json")


def recorded(name: str, formats: Formats | None = None) -> Program:
    c = config(name)
    sizes = Sizes(groups(c, 4, formats or Formats()), (8,), 32)
    return forward(c, dict.fromkeys(TABLE.shapes(c), "bf16"), sizes, formats)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("all_experts_bf16", [EXPERTS, EXPERTS]),
        ("one_dense_f32_shards", [EXPERTS, DENSE, EXPERTS]),
        ("every_second_f16", [DENSE, EXPERTS, DENSE, EXPERTS]),
    ],
)
def test_the_calls_in_model_order(name: str, layers: list[list[str]]) -> None:
    calls = recorded(name).on_one_rank().calls
    assert [c.spec.name for c in calls] == ["embedding", *(op for layer in layers for op in layer), "lm_head"]


@pytest.mark.parametrize(
    ("name", "renormalize"), [("all_experts_bf16", True), ("one_dense_f32_shards", False)]
)
def test_routing(name: str, renormalize: bool) -> None:
    for call in (c for c in recorded(name).calls if c.spec.name == "moe"):
        assert call.attrs == {
            "eps": 1e-6, "sigmoid": False, "renormalize": renormalize,
            "scale": 1.0, "groups": 1, "kept_groups": 1,
        }  # fmt: skip
        assert call.tensors["experts"].shape == ("T", 3)


def test_router_and_sums_are_float32_whatever_the_rest_is() -> None:
    program = recorded("all_experts_bf16", Formats(activation="bf16", residual="bf16", kv="bf16"))
    lowered = program.lowered(lambda _: False)
    found = {t.name.rsplit(".", 1)[-1]: t.dtype for t in lowered.tensors(Kind.BUFFER)}
    assert {found[n] for n in ("logits", "gates", "partial")} == {"f32"}
    assert {found[n] for n in ("h", "act", "q", "attn")} == {"bf16"}
    assert found["experts"] == "i32"


def test_where_logits_come_from() -> None:
    assert head(config("one_dense_f32_shards"), {"norm": "f32", "lm_head": "q8_0"}, "f32").weight == "lm_head"
    assert head(config("all_experts_bf16"), {"norm": "f32", "embed": "q8_0"}, "f32").weight == "embed"
