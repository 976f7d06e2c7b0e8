"""The recorded forward: which layers have experts, how tokens are routed, what is cached, which formats."""

from __future__ import annotations

import pytest

from pegainfer.kv.device.layout import block_bytes
from pegainfer.models.deepseek_v2.config import DeepseekV2Config
from pegainfer.models.deepseek_v2.forward import forward, groups, head
from pegainfer.models.deepseek_v2.weights import TABLE
from pegainfer.ops.program import Program
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import Formats, Sizes
from tests.null.models.deepseek_v2.test_config import LITE
from tests.support.tinydeepseek import MODELS

ATTENTION = ["mla_qkv_append", "mla_attention", "linear_residual"]
DENSE = [*ATTENTION, "gate_up_swiglu", "linear_residual"]
# The shared block reads the residual stream before the experts are added to it.
EXPERTS = [*ATTENTION, "gate_up_swiglu", "moe", "reduce_residual", "linear_residual"]


def config(name: str, **fields: object) -> DeepseekV2Config:
    return DeepseekV2Config.from_hf(MODELS[name].hf_config() | fields, "config.json")


def recorded(c: DeepseekV2Config, formats: Formats | None = None) -> Program:
    sizes = Sizes(groups(c, 16, formats or Formats()), (8,), 32)
    weights = {name: "f32" if len(shape) == 1 else "bf16" for name, shape in TABLE.shapes(c).items()}
    return forward(c, weights, sizes, formats)


def names(c: DeepseekV2Config) -> list[str]:
    return [call.spec.name for call in recorded(c).on_one_rank().calls]


def test_the_calls_in_model_order() -> None:
    assert names(config("lite_bf16")) == ["embedding", *DENSE, *EXPERTS, *EXPERTS, "lm_head"]


def test_a_model_without_a_shared_block() -> None:
    found = names(config("lite_bf16", n_shared_experts=None, num_hidden_layers=2))
    assert found == ["embedding", *DENSE, *ATTENTION, "moe", "reduce_residual", "lm_head"]


# sigmoid, renormalize, scale, groups, kept_groups; whether a bias corrects the choice
ROUTING: dict[str, tuple[tuple[object, ...], bool]] = {
    "lite_bf16": ((False, False, 1.0, 1, 1), False),
    "grouped_f32_shards": ((False, False, 16.0, 4, 2), False),
    "v3_bf16": ((True, True, 2.5, 4, 2), True),
}


@pytest.mark.parametrize("name", ROUTING)
def test_routing(name: str) -> None:
    values, bias = ROUTING[name]
    attrs = dict(zip(("sigmoid", "renormalize", "scale", "groups", "kept_groups"), values, strict=True))
    calls = [c for c in recorded(config(name)).calls if c.spec.name == "moe"]
    assert calls
    for call in calls:
        assert call.attrs == {"eps": 1e-6, **attrs}
        assert ("bias" in call.tensors) == bias


def test_norms_of_latents_have_an_epsilon_of_their_own() -> None:
    """1e-6 where rms_norm_eps is 1e-5, as in Kimi-K2.5."""
    calls = [c for c in recorded(config("kimi_text_f32")).calls if c.spec.name == "mla_qkv_append"]
    assert {(c.attrs["eps"], c.attrs["latent_eps"]) for c in calls} == {(1e-5, 1e-6)}


def test_a_token_of_v2_lite_caches_576_numbers_a_layer() -> None:
    (layout,) = groups(DeepseekV2Config.from_hf(LITE, "config.json"), 16, Formats(kv="bf16"))
    assert layout.parts[0].shape == (27, 16, 576)
    assert block_bytes(layout) == 497_664


def test_router_and_sums_are_float32_whatever_the_rest_is() -> None:
    program = recorded(config("v3_bf16"), Formats(activation="bf16", residual="bf16", kv="bf16"))
    lowered = program.lowered(lambda _: False)
    found = {t.name.rsplit(".", 1)[-1]: t.dtype for t in lowered.tensors(Kind.BUFFER)}
    assert {found[n] for n in ("gates", "partial")} == {"f32"}
    assert {found[n] for n in ("h", "act", "q", "attn", "latent", "absorbed", "attended")} == {"bf16"}


def test_where_logits_come_from() -> None:
    untied = config("lite_bf16")
    assert head(untied, {"norm": "f32", "lm_head": "q8_0"}, "f32").weight == "lm_head"
