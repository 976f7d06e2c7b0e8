"""The recorded forward: which ops in which order, and the storage formats of what they compute."""

from __future__ import annotations

import pytest

from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.forward import forward, groups, head
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.program import Program
from pegainfer.ops.sampler import prompt_logprobs
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import Formats, Sizes
from tests.support.tinyqwen3 import MODELS

LAYER = ["qkv_norm_rope_append", "attention", "linear_residual", "gate_up_swiglu", "linear_residual"]


def config(name: str) -> Qwen3Config:
    return Qwen3Config.from_hf(MODELS[name].hf_config(), "config.json")


def recorded(name: str, formats: Formats | None = None) -> Program:
    c = config(name)
    sizes = Sizes(groups(c, 4, formats or Formats()), (8,), 32)
    return forward(c, dict.fromkeys(TABLE.shapes(c), "bf16"), sizes, formats)


def test_the_calls_in_model_order() -> None:
    program = recorded("tied_bf16")
    one_rank = ["embedding", *LAYER, *LAYER, "lm_head"]
    assert [c.spec.name for c in program.on_one_rank().calls] == one_rank
    reductions = [c.spec.name for c in program.calls if c.spec.fold is not None]
    assert reductions == ["reduce_residual"] * 2 * 2  # after attention's and the feed-forward's last matrix
    assert len(program.calls) == len(one_rank) + len(reductions)
    for layer, call in enumerate(c for c in program.calls if c.spec.name == LAYER[0]):
        assert call.attrs["layer"] == layer
        assert call.tensors["q_norm"].name == f"layers.{layer}.q_norm"
        assert call.tensors["k_norm"].name == f"layers.{layer}.k_norm"


@pytest.mark.parametrize(("name", "weight"), [("tied_bf16", "embed"), ("untied_f32_shards", "lm_head")])
def test_where_logits_come_from(name: str, weight: str) -> None:
    assert recorded(name).calls[-1].tensors["w"].name == weight
    assert head(config(name), {"norm": "f32", weight: "q8_0"}, "f32").weight == weight


def test_all_is_float32_unless_told() -> None:
    program = recorded("tied_bf16")
    computed = program.lowered(lambda _: False).tensors(Kind.BUFFER, Kind.OUTPUT, Kind.STATE)
    assert {t.dtype for t in computed} == {"f32"}


@pytest.mark.parametrize("residual", ["bf16", "f32"])
def test_activations_and_residual_have_formats_of_their_own(residual: str) -> None:
    """Logits and the rotation's table are float32 whatever the rest is."""
    program = recorded("tied_bf16", Formats(activation="bf16", residual=residual, kv="f16"))
    assert next(t for t in program.tensors(Kind.BUFFER) if t.name == "partial").dtype == "f32"
    one_rank = program.on_one_rank()
    found = {t.name: t.dtype for t in one_rank.tensors(Kind.BUFFER, Kind.OUTPUT, Kind.STATE)}
    assert found == {"x": residual, "q": "bf16", "attn": "bf16", "act": "bf16", "kv": "f16", "logits": "f32"}
    inner = program.lowered(lambda _: False).tensors(Kind.BUFFER)
    beside = {t.name: t.dtype for t in inner if not t.name.startswith("11.lm_head")}
    assert set(beside.values()) == {"bf16"}


def test_prompt_logprobs_read_the_residual_stream_as_it_is() -> None:
    c = config("tied_bf16")
    program = prompt_logprobs(head(c, {"norm": "f32", "embed": "bf16"}, "bf16"), c.vocab_size, max_logprobs=5)
    (x,) = (t for t in program.tensors(Kind.INPUT) if t.name == "x")
    assert (x.dtype, x.shape) == ("bf16", ("T", 64))
    shapes = {t.name: t.shape for t in program.tensors(Kind.OUTPUT)}
    assert shapes["top_ids"] == shapes["top_logprobs"] == ("L", 5)
