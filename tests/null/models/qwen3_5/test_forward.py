"""The recorded forward: which ops in which order, what a sequence keeps, and how a GPU runs it."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.kv.device.layout import StateLayout, block_bytes
from pegainfer.lower.cuda.lowering import Step
from pegainfer.lower.cuda.planning import plan_program
from pegainfer.lower.cuda.target import Target, card_of
from pegainfer.models.qwen3_5.config import Qwen3_5Config
from pegainfer.models.qwen3_5.forward import forward, groups
from pegainfer.models.qwen3_5.weights import TABLE
from pegainfer.ops.program import Program
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import Formats, Sizes
from tests.null.models.qwen3_5.test_config import QWEN3_5_4B
from tests.null.models.qwen3_5.test_moe_config import QWEN3_5_35B_A3B
from tests.support.tinyqwen3_5 import MODELS
from tests.support.tinyqwen3_5moe import MODELS as MOE

LINEAR = ["gated_delta", "linear_residual"]
FULL = ["gated_qkv_norm_rope_append", "attention", "sigmoid_gate", "linear_residual"]
MLP = ["gate_up_swiglu", "linear_residual"]
EXPERTS = ["moe", "moe", "reduce_residual", "reduce_residual"]  # the routed ones and the shared one
BF16 = Formats(activation="bf16", residual="bf16", kv="bf16")


def recorded(c: Qwen3_5Config, formats: Formats | None = None, positions: int = 64) -> Program:
    sizes = Sizes(groups(c, 16, formats or Formats()), (8, 3), positions)
    names = {n: "bf16" if len(s) > 1 else "f32" for n, s in TABLE.shapes(c).items()}
    return forward(c, names, sizes, formats)


def test_the_calls_in_model_order() -> None:
    c = Qwen3_5Config.from_hf(MODELS["published_bf16"].hf_config(), "config.json")
    program = recorded(c).on_one_rank()
    layers = [op for kind in (LINEAR, FULL, LINEAR, FULL, LINEAR) for op in (*kind, *MLP)]
    assert [call.spec.name for call in program.calls] == ["embedding", *layers, "lm_head"]
    for op, weight in (("attention", None), ("gated_delta", "a_log")):
        calls = [call for call in program.calls if call.spec.name == op]
        assert [call.attrs["layer"] for call in calls] == list(range(len(calls)))  # within its own group
        if weight is not None:
            assert [call.tensors[weight].name for call in calls] == [f"layers.{i}.a_log" for i in (0, 2, 4)]


def test_experts_in_place_of_the_feed_forward_block() -> None:
    """Both mixtures read the stream as attention left it: their results are added afterwards."""
    c = Qwen3_5Config.from_hf(MOE["moe_published_bf16"].hf_config(), "config.json")
    calls = recorded(c).on_one_rank().calls
    layers = [op for kind in (LINEAR, LINEAR, LINEAR, FULL) for op in (*kind, *EXPERTS)]
    assert [call.spec.name for call in calls] == ["embedding", *layers, "lm_head"]
    routed, shared, *sums = calls[3:7]
    assert {k: v for k, v in routed.attrs.items() if k != "eps"} == {
        "sigmoid": False, "renormalize": True, "scale": 1.0, "groups": 1, "kept_groups": 1,
    }  # fmt: skip
    assert (shared.attrs["sigmoid"], shared.attrs["renormalize"]) == (True, False)
    assert [call.tensors["w_up"].shape for call in (routed, shared)] == [(8, 32, 64), (1, 64, 64)]
    assert [call.tensors["experts"].shape for call in (routed, shared)] == [("T", 3), ("T", 1)]
    assert {call.tensors["partial"] for call in sums} == {routed.tensors["out"], shared.tensors["out"]}


@pytest.mark.parametrize(
    ("config", "token", "state", "every"),
    [(QWEN3_5_4B, 32_768, 51_511_296, 256), (QWEN3_5_35B_A3B, 20_480, 64_389_120, 512)],
    ids=["4B", "35B-A3B"],
)
def test_what_a_sequence_keeps(config: dict[str, Any], token: int, state: int, every: int) -> None:
    """In bf16: bytes a token and a state."""
    pages, states = groups(Qwen3_5Config.from_hf(config, "config.json"), 16, BF16)
    assert block_bytes(pages) == 16 * token
    assert block_bytes(states) == state
    assert isinstance(states, StateLayout) and states.snapshot_every == every
    assert {part.name: part.dtype for part in states.parts} == {"conv": "bf16", "delta": "f32"}


def test_all_is_float32_unless_told() -> None:
    c = Qwen3_5Config.from_hf(MODELS["true_heads_bf16"].hf_config(), "config.json")
    computed = recorded(c).lowered(lambda _: False).tensors(Kind.BUFFER, Kind.OUTPUT, Kind.STATE)
    assert {t.dtype for t in computed} == {"f32"}


@pytest.mark.parametrize("config", [QWEN3_5_4B, QWEN3_5_35B_A3B], ids=["4B", "35B-A3B"])
def test_every_op_of_a_model_has_a_gpu_kernel(config: dict[str, Any]) -> None:
    """One decoded row, several of them, a prompt, and both together; on Hopper and elsewhere."""
    program = recorded(Qwen3_5Config.from_hf(config, "config.json"), BF16, 4096).on_one_rank()
    for arch in ("80", "90a", "120a"):
        for tokens, rows in ((1, 1), (8, 8), (64, 64), (1024, 1), (129, 64)):
            step = Step(Target(card_of(arch)), {"T": tokens, "R": rows, "L": rows}, tokens == rows)
            plan = plan_program(program, step)
            assert all(launches for _, launches in plan.calls), (arch, tokens)
            assert sum(plan.replaces) == len(program.calls)
            names = {call.spec.name for call, _ in plan.calls}
            assert any(name.endswith("gated_delta") for name in names)
            # The output gate follows attention, also where attention finishes the heads itself.
            order = [call.spec.name for call, _ in plan.calls]
            gates = {"attention": "sigmoid_gate", "append_attention": "gate_heads"}
            assert all(order[i + 1] == gates[name] for i, name in enumerate(order) if name in gates)


def test_few_launches_decode_a_token_of_the_4b_model() -> None:
    """A layer of linear attention takes five launches, one of full attention six; none normalises apart."""
    program = recorded(Qwen3_5Config.from_hf(QWEN3_5_4B, "config.json"), BF16, 4096).on_one_rank()
    plan = plan_program(program, Step(Target(card_of("90a")), {"T": 1, "R": 1, "L": 1}, True))
    layers = [len(launches) for _, launches in plan.calls[1:-1]]
    assert layers[:5] == [2 + 1, 1, 1, 1, 2]  # the first one follows the embedding, so its norm is apart
    assert sum(layers) == 1 + 24 * 5 + 8 * 6
