"""Which experts a step's tokens went to, as outputs of its program."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from pegainfer.contract.errors import ConfigError
from pegainfer.ops.moe import MOE
from pegainfer.ops.moe_shard import MOE_SHARD
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.tensor import Kind

PREFIX = "experts."  # of the outputs; the layer's number follows


class Choices(msgspec.Struct, frozen=True):
    """The output of a counting program that holds a layer's choices: [T, K] int32."""

    output: str
    layer: int
    num_experts: int


def counting(program: Program) -> Program:
    """The program with each mixture's choices kept as an output, in place of a buffer that layers share.

    A mixture of one expert has no choice and stays as it is. Raises ConfigError where there is no other.
    """
    calls = tuple(
        _with_output(c) if c.spec in (MOE, MOE_SHARD) and c.axes["N"] != 1 else c for c in program.calls
    )
    if calls == program.calls:
        raise ConfigError(
            "the model has no experts to count", expected="a mixture of experts", where="expert_stats"
        )
    return Program(program.name, calls)


def choices_of(program: Program) -> tuple[Choices, ...]:
    """The outputs that `counting` made, by layer; also where mixtures were lowered since."""
    found: dict[str, int] = {}
    for call in program.calls:
        experts, count = call.tensors.get("experts"), call.axes.get("N")
        if experts is not None and experts.kind is Kind.OUTPUT and isinstance(count, int):
            found.setdefault(experts.name, count)
    return tuple(Choices(name, int(name.removeprefix(PREFIX)), count) for name, count in found.items())


def _with_output(call: OpCall) -> OpCall:
    """Weights of layers are called layers.NUMBER.NAME."""
    layer = call.tensors["w_router"].name.split(".")[1]
    experts = replace(call.tensors["experts"], name=PREFIX + layer, kind=Kind.OUTPUT)
    return replace(call, tensors={**call.tensors, "experts": experts})
