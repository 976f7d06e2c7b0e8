"""A recorded program in another arithmetic: models record float32, the GPU keeps activations in 16 bits."""

from __future__ import annotations

from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.spec import Role
from pegainfer.ops.tensor import Kind, Tensor

CAST = (Kind.INPUT, Kind.BUFFER, Kind.OUTPUT, Kind.STATE)


def cast_program(program: Program, dtype: str) -> Program:
    """The same calls with every float32 activation and state in `dtype`.

    A tensor stays float32 where an op takes nothing else there (logits, scores), and so do small operands
    that are constants (norms' weights, the rotation's table).
    """
    lowered = program.lowered(keep=lambda call: False)
    stay = {
        t.storage
        for call in (*program.calls, *lowered.calls)
        for o in call.spec.operands
        if (t := call.tensors.get(o.name)) is not None and (dtype not in o.dtypes or t.dtype != "f32")
    }
    parameters = {
        t.storage
        for call in program.calls
        for o in call.spec.operands
        if (t := call.tensors.get(o.name)) is not None and o.role is Role.IN and len(o.axes) == 1
    }
    fresh = {
        t: Tensor(t.name, t.shape, dtype, t.kind)
        for t in program.tensors(*CAST)
        if t not in stay and t not in parameters
    }

    def cast(t: Tensor) -> Tensor:
        new = fresh.get(t.storage)
        if new is None:
            return t
        return new if t.base is None else Tensor(t.name, t.shape, dtype, t.kind, new)

    calls = tuple(
        OpCall(c.spec, {k: cast(t) for k, t in c.tensors.items()}, c.attrs, c.axes) for c in program.calls
    )
    return Program(program.name, calls)
