"""Programs with adapters: what is inserted where, and which modules may be named."""

from __future__ import annotations

from functools import partial

import pytest

from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.forward import forward, groups, head
from pegainfer.models.llama.weights import TABLE
from pegainfer.ops.adapters import AdapterBounds, adapted, adapted_weights
from pegainfer.ops.program import Program
from pegainfer.ops.sampler import prompt_logprobs
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import Formats, Sizes
from tests.support.tinymodel import MODELS, Tiny

BOUNDS = AdapterBounds(3, 8, "f32")


def config_of(model: Tiny) -> LlamaConfig:
    return LlamaConfig.from_hf(model.hf_config(), "config.json")


def program_of(config: LlamaConfig) -> Program:
    formats = dict.fromkeys(TABLE.shapes(config), "f32")
    sizes = Sizes(groups(config, 16, Formats()), num_blocks=(4,), num_positions=64)
    return partial(forward, config)(formats, sizes, Formats())


@pytest.mark.parametrize("name", ["tied_f32", "untied_bf16_shards"])
def test_every_matrix_of_the_checkpoint_can_be_named(name: str) -> None:
    config = config_of(MODELS[name])
    found = {w.module: w for w in adapted_weights(TABLE, config)}
    shapes = {k.removesuffix(".weight"): v for k, v in MODELS[name].shapes().items() if len(v) == 2}
    shapes.setdefault("lm_head", shapes["model.embed_tokens"])
    assert {m: (w.base.rows, w.base.columns) for m, w in found.items()} == shapes
    assert [m for m, w in found.items() if w.base.embedding] == ["model.embed_tokens"]
    assert len({w.key for w in found.values()}) == len(found), "a tied matrix has factors for each use"


def test_factors_follow_their_gemm_before_anything_reads_its_result() -> None:
    config = config_of(MODELS["tied_f32"])
    weights = adapted_weights(TABLE, config)
    whole = adapted(program_of(config).on_one_rank(), weights, BOUNDS)
    calls = whole.lowered(keep=lambda _: False).calls
    seen = []
    for i, call in enumerate(calls):
        if call.spec.name not in ("linear", "linear_residual", "embedding"):
            continue
        down, up = calls[i + 1 : i + 3]
        result = call.tensors["x" if call.spec.name == "linear_residual" else "out"]
        assert down.spec.name == ("lora_lookup" if call.spec.name == "embedding" else "lora_shrink")
        assert up.spec.name == "lora_expand" and up.tensors["x"] is result
        assert up.tensors["h"] is down.tensors["out"]
        rows = "logit_adapters" if call.axes["T"] == "L" else "adapters"
        assert down.tensors["adapters"].name == up.tensors["adapters"].name == rows
        seen.append(up.tensors["up"].name)
    assert sorted(seen) == sorted(f"{w.key}.up" for w in weights)
    layer = ["lora_qkv_norm_rope_append", "attention", "lora_linear_residual", "lora_gate_up_swiglu"]
    names = [c.spec.name for c in whole.calls]
    assert names[3:-5] == [*layer, "lora_linear_residual"] * config.num_layers
    assert names[-5:] == ["gather_rows", "rms_norm", "linear", "lora_shrink", "lora_expand"]


def test_states_hold_every_adapter_at_the_greatest_rank() -> None:
    config = config_of(MODELS["tied_f32"])
    program = adapted(program_of(config), adapted_weights(TABLE, config), BOUNDS)
    shapes = {t.name: t.shape for t in program.tensors(Kind.STATE)}
    assert shapes["lora.embed.lookup.down"] == (3, 160, 8) and shapes["lora.embed.lookup.up"] == (3, 8, 64)
    assert shapes["lora.embed.linear.down"] == (3, 8, 64) and shapes["lora.embed.linear.up"] == (3, 8, 160)
    assert shapes["lora.layers.1.w_down.linear.down"] == (3, 8, 96)
    assert shapes["lora.layers.1.w_down.linear.ranks"] == (3,)


def test_weights_that_none_may_name_keep_their_coarse_ops() -> None:
    config = config_of(MODELS["tied_f32"])
    only = [w for w in adapted_weights(TABLE, config) if w.module.endswith("o_proj")]
    names = [c.spec.name for c in adapted(program_of(config), only, BOUNDS).calls]
    assert names.count("qkv_norm_rope_append") == names.count("lora_linear_residual") == config.num_layers
    assert "lm_head" in names


@pytest.mark.parametrize("without", ["q_proj", "up_proj"])
def test_a_layer_of_which_adapters_may_name_a_part_is_lowered(without: str) -> None:
    config = config_of(MODELS["tied_f32"])
    some = [w for w in adapted_weights(TABLE, config) if not w.module.endswith(without)]
    names = [c.spec.name for c in adapted(program_of(config), some, BOUNDS).calls]
    lowered = "lora_qkv_norm_rope_append" if without == "q_proj" else "lora_gate_up_swiglu"
    assert lowered not in names and "linear" in names


def test_prompt_logprobs_have_the_heads_factors_alone() -> None:
    config = config_of(MODELS["untied_bf16_shards"])
    formats = dict.fromkeys(TABLE.shapes(config), "f32")
    program = adapted(
        prompt_logprobs(head(config, formats, "f32"), config.vocab_size, 5),
        adapted_weights(TABLE, config),
        BOUNDS,
    )
    states = {t.name.rpartition(".")[0] for t in program.tensors(Kind.STATE)}
    assert states == {"lora.lm_head.linear"}
    assert "logit_adapters" in {t.name for t in program.tensors(Kind.INPUT)}
