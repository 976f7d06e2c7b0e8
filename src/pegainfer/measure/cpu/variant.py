"""Names of the CPU's kernels in the ledger, and the arithmetic in which each computes."""

from __future__ import annotations

from collections.abc import Mapping

from pegainfer.kernels.cpu.library import has_bf16
from pegainfer.lower.cpu.backend import Activation
from pegainfer.ops.spec import OpSpec, Role


def activation_on(activation: Activation, isa: str | None) -> Activation:
    """The activation format that these kernels use for CpuOptions.activation: 'int8' instead of 'bf16' where
    they cannot multiply bf16."""
    return "int8" if activation == "bf16" and not has_bf16(isa) else activation


def arithmetic_of(spec: OpSpec, dtypes: Mapping[str, str], activation: Activation) -> str:
    """'int8' where quantised weights meet activations rounded to it, 'bf16' likewise, else 'f32'.

    Args:
        dtypes: of each operand in use.
        activation: as `activation_on` gives it.
    """
    formats = _formats(spec, dtypes)
    if activation != "f32" and "int8" in spec.tolerance and any(d.startswith("q") for d in formats):
        return "int8"
    return "bf16" if activation == "bf16" and "bf16" in spec.tolerance and "bf16" in formats else "f32"


def variant_of(spec: OpSpec, dtypes: Mapping[str, str], isa: str, activation: Activation) -> str:
    """'cpu.<isa>.<formats>.<arithmetic>', as 'cpu.avx512.q4_1.int8'; no formats where only numbers move."""
    formats = "+".join(dict.fromkeys(_formats(spec, dtypes)))
    return ".".join(part for part in ("cpu", isa, formats, arithmetic_of(spec, dtypes, activation)) if part)


def _formats(spec: OpSpec, dtypes: Mapping[str, str]) -> list[str]:
    """Of the matrices; of the KV cache where there are none."""
    weights = [dtypes[o.name] for o in spec.operands if o.role is Role.WEIGHT and o.name in dtypes]
    return weights or ([dtypes["kv"]] if "kv" in dtypes else [])
