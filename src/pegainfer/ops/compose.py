"""Calls of one op as a program of their own, and an op run by its reference, coarse ones by composition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pegainfer.ops.embed import GATHER_ROWS
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.spec import STEP_AXES, Arrays, OpSpec, Role
from pegainfer.ops.tensor import Dim, Tensor

Array = np.ndarray[Any, Any]
STAGED = ".staged"  # suffix of the input that an in-place operand is copied from
STAGED_ROWS = "staged_rows"


def one_call(
    spec: OpSpec, sizes: Mapping[str, int], dtypes: Mapping[str, str], attrs: Mapping[str, Any]
) -> Program:
    """A program of one call; tensors bear the operands' names.

    An operand written in place is an output, copied by gather_rows from the input `<name>.staged` first, for
    inputs are the host's and not a program's to write.

    Args:
        sizes: of every axis letter in use.
        dtypes: of every operand in use; optional operands without one are left out.
    """
    return many_calls(spec, sizes, dtypes, [attrs], frozenset())


def many_calls(
    spec: OpSpec,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str],
    attrs: Sequence[Mapping[str, Any]],
    own: frozenset[str],
) -> Program:
    """The same with a call for each of `attrs`, on the same tensors but for operands named in `own`.

    Those are each call's own: `<name>.<number>`.
    """
    b = Builder(spec.name)
    make = {Role.IN: b.input, Role.OUT: b.output, Role.STATE: b.state, Role.WEIGHT: b.weight}
    used = [o for o in spec.operands if o.name in dtypes]
    shared: dict[str, Tensor] = {}
    for o in used:
        shape = tuple(_dim(axis, sizes) for axis in o.axes)
        if o.role is Role.INOUT:
            shared[o.name] = _staged(b, o.name, shape, dtypes[o.name])
        elif o.name not in own:
            shared[o.name] = make[o.role](o.name, *shape, dtype=dtypes[o.name])
    for i, given in enumerate(attrs):
        mine = {
            o.name: make[o.role](f"{o.name}.{i}", *(_dim(a, sizes) for a in o.axes), dtype=dtypes[o.name])
            for o in used
            if o.name in own
        }
        b.emit(spec, given, **shared, **mine)
    return b.build()


def _staged(b: Builder, name: str, shape: tuple[Dim, ...], dtype: str) -> Tensor:
    rows, width = shape[0], int(np.prod([d for d in shape[1:] if isinstance(d, int)]))
    target = b.output(name, *shape, dtype=dtype)
    source = b.input(name + STAGED, *shape, dtype=dtype)
    picked = b.input(STAGED_ROWS, rows)
    b.emit(GATHER_ROWS, None, out=target.view(rows, width), x=source.view(rows, width), rows=picked)
    return target


def _dim(axis: str, sizes: Mapping[str, int]) -> Dim:
    if axis.isdigit():
        return int(axis)
    return axis if axis in STEP_AXES else sizes[axis]


def staged_inputs(spec: OpSpec, arrays: Arrays) -> Arrays:
    """The inputs of `one_call`'s program."""
    inputs = {o.name: arrays[o.name] for o in spec.operands if o.role is Role.IN and o.name in arrays}
    for o in spec.operands:
        if o.role is Role.INOUT:
            inputs[o.name + STAGED] = arrays[o.name]
            inputs[STAGED_ROWS] = np.arange(len(arrays[o.name]), dtype=np.int32)
    return inputs


def run_reference(spec: OpSpec, sizes: Mapping[str, int], arrays: Arrays, attrs: Mapping[str, Any]) -> None:
    """Writes the op's outputs into `arrays`. Weights are float32 [N, K]; states are written in place."""
    if spec.reference is not None:
        with np.errstate(over="ignore"):  # a value past float16's largest is stored as infinity
            spec.reference(**arrays, **attrs)
        return
    dtypes = {name: dtype_name(a) for name, a in arrays.items()}
    program = one_call(spec, sizes, dtypes, attrs)
    kept = [o.name for o in spec.operands if o.role in (Role.WEIGHT, Role.STATE)]
    held = {name: arrays[name] for name in kept if name in arrays}
    outputs = ReferenceExecutor(program, held).run(staged_inputs(spec, arrays), sizes)
    for name, value in outputs.items():
        arrays[name][...] = value


def dtype_name(a: Array) -> str:
    """'f32' for float32, 'i32' for int32, and so on.

    Bytes are 8-bit floats and uint16 is bf16: no op has other arrays of these.
    """
    bits = {np.dtype(np.uint8): "f8_e4m3", np.dtype(np.uint16): "bf16"}
    return bits.get(a.dtype, f"{a.dtype.kind}{8 * a.dtype.itemsize}")
