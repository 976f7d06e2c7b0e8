"""The instructions of the CPU's kernels. Numbers and layouts follow from the ops' declarations, and csrc/
instructions.h is generated from them (`python -m pegainfer.kernels.headers`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import pegainfer.ops.coarse
import pegainfer.ops.lora
import pegainfer.ops.reduce
import pegainfer.ops.sample  # noqa: F401  (they declare their ops)
from pegainfer.ops.spec import REGISTRY, Operand, OpSpec, Role

# Ops that have a CPU kernel. An op's place is its number.
OPCODES = (
    "embedding",
    "gather_rows",
    "rms_norm",
    "head_norm",
    "linear",
    "linear_residual",
    "rope",
    "kv_append",
    "attention",
    "silu_mul",
    "qkv_norm_rope_append",
    "gate_up_swiglu",
    "lm_head",
    "adjust_logits",
    "sample_tokens",
    "append_tokens",
    "token_logprobs",
    "gated_rms_norm",
    "sigmoid_gate",
    "causal_conv_silu",
    "gated_delta_rule",
    "route_experts",
    "expert_gate_up",
    "expert_down",
    "reduce_residual",
    "lora_shrink",
    "lora_lookup",
    "lora_expand",
    "head_linear",
    "rope_tail",
    "latent_append",
    "latent_attention",
    "local_experts",
)
C_TYPES = {"i32": "int32_t", "u32": "uint32_t", "u64": "uint64_t"}

_HEAD = """\
// Generated from the ops' declarations by `python -m pegainfer.kernels.headers`; do not edit.
// clang-format off
#pragma once

#include <cstdint>

namespace pega {

struct Packed;

enum Op : int32_t {
%s
    kNumOps
};

// How many words the instruction of an op has (program.h).
struct Arity {
    int operands, axes, attrs;
};
constexpr Arity kArity[kNumOps] = {
%s
};

// The arguments of an op in a step: operands, axis sizes, attributes. Each takes eight bytes.
"""


def axis_letters(spec: OpSpec) -> tuple[str, ...]:
    """The op's axes in the order in which its operands name them."""
    return tuple(dict.fromkeys(a for o in spec.operands for a in o.axes if not a.isdigit()))


def header(names: Sequence[str] = OPCODES, specs: Mapping[str, OpSpec] = REGISTRY) -> str:
    """The text of csrc/instructions.h: an enumerator and an argument struct for each op."""
    ops = [specs[name] for name in names]
    numbers = "\n".join(f"    k{_camel(op.name)} = {i}," for i, op in enumerate(ops))
    arities = "\n".join(
        f"    {{{len(op.operands)}, {len(axis_letters(op))}, {len(op.attrs)}}},  // {op.name}" for op in ops
    )
    body = _HEAD % (numbers, arities) + "".join(_struct(op) for op in ops)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body}\nconstexpr const char* kDeclarationHash =\n    "{digest}";\n\n}}  // namespace pega\n'


def declaration_hash() -> str:
    """SHA-256 of what the library must have been built from to understand these instructions."""
    return header().split('"')[-2]


def _struct(op: OpSpec) -> str:
    lines = [f"\n// {op.doc}", f"struct {_camel(op.name)}Args {{"]
    for o in op.operands:
        shape = f"[{', '.join(o.axes)}]" + ("; may be null" if o.optional else "")
        lines.append(f"    {_c_type(o)} {o.name};  // {shape}")
    if letters := axis_letters(op):
        lines.append(f"    int64_t {', '.join(letters)};")
    if op.attrs:
        lines.append(f"    double {', '.join(op.attrs)};")
    return "\n".join([*lines, "};\n"])


def _c_type(o: Operand) -> str:
    if o.role is Role.WEIGHT:
        return "const Packed*"
    if o.paged:
        return "uint8_t*"  # of float32, float16 or e4m3
    # The kernels compute in float32; lowering refuses other floats.
    kind = C_TYPES.get(o.dtypes[0], "float")
    return f"const {kind}*" if o.role is Role.IN else f"{kind}*"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
