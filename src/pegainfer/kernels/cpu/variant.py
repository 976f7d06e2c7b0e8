"""What the CPU's kernels are called in the ledger, and in which arithmetic each computes."""

from __future__ import annotations

from collections.abc import Mapping

from pegainfer.ops.spec import OpSpec, Role


def arithmetic_of(spec: OpSpec, dtypes: Mapping[str, str], int8: bool) -> str:
    """'int8' where quantised weights meet rounded activations (CpuOptions.activation), else 'f32'.

    Args:
        dtypes: of each operand in use.
    """
    quantised = any(d.startswith("q") for d in _formats(spec, dtypes))
    return "int8" if int8 and quantised and "int8" in spec.tolerance else "f32"


def variant_of(spec: OpSpec, dtypes: Mapping[str, str], isa: str, int8: bool) -> str:
    """'cpu.<isa>.<formats>.<arithmetic>', as 'cpu.avx512.q4_1.int8'; no formats where only numbers move."""
    formats = "+".join(dict.fromkeys(_formats(spec, dtypes)))
    return ".".join(part for part in ("cpu", isa, formats, arithmetic_of(spec, dtypes, int8)) if part)


def _formats(spec: OpSpec, dtypes: Mapping[str, str]) -> list[str]:
    """Of the matrices; of the KV cache where there are none."""
    weights = [dtypes[o.name] for o in spec.operands if o.role is Role.WEIGHT and o.name in dtypes]
    return weights or ([dtypes["kv"]] if "kv" in dtypes else [])
