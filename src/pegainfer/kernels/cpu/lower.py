"""From a recorded program to the instructions of csrc/exec.h."""

from __future__ import annotations

from collections.abc import Callable

from pegainfer.contract.errors import UnsupportedError
from pegainfer.kernels.cpu.library import MAX_SIZES, Instr
from pegainfer.kernels.cpu.packed import FORMAT_CODES
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.spec import Role
from pegainfer.ops.tensor import Kind, Tensor

# op -> (number, axis letters in order), as csrc/exec.h has them. Operands are in the declaration's order.
INSTRUCTIONS: dict[str, tuple[int, str]] = {
    "embedding": (0, "TVM"),
    "gather_rows": (1, "LMT"),
    "rms_norm": (2, "TM"),
    "head_norm": (3, "THD"),
    "linear": (4, "TNK"),
    "linear_residual": (5, "TNK"),
    "rope": (6, "THDP"),
    "kv_append": (7, "TNYGSD"),
    "attention": (8, "TNYGSDHRW"),
    "silu_mul": (9, "TF"),
    "qkv_norm_rope_append": (10, "TNYGSDHMP"),
    "gate_up_swiglu": (11, "TFM"),
    "lm_head": (12, "LVMT"),
    "adjust_logits": (13, "LVJEIUOZX"),
    "sample_tokens": (14, "LV"),
    "append_tokens": (15, "LZX"),
    "token_logprobs": (16, "LVK"),
    "gated_rms_norm": (17, "THD"),
    "sigmoid_gate": (18, "TA"),
    "causal_conv_silu": (19, "TFNYXWR"),
    "gated_delta_rule": (20, "TFNYHKVR"),
}
RECURRENT = ("causal_conv_silu", "gated_delta_rule")
TILE = 16  # output rows of a packed weight's tile


def runs_whole(call: OpCall) -> bool:
    """Whether a coarse call has a kernel of its own; it is lowered otherwise."""
    if call.spec.name == "qkv_norm_rope_append":
        head_dim = call.axes["D"]  # a unit of that kernel is a head, and must be whole tiles
        return isinstance(head_dim, int) and head_dim % TILE == 0
    return call.spec.name in INSTRUCTIONS


def lowered(program: Program) -> Program:
    """The program in ops that have kernels. Raises UnsupportedError with the reason where one has none."""
    low = program.lowered(keep=runs_whole)
    for call in low.calls:
        _check(call)
    return low


def encode(call: OpCall, place: Callable[[Tensor], int], sizes: list[str]) -> Instr:
    """One instruction.

    Args:
        place: a tensor's number in the table of addresses.
        sizes: collects the names of step sizes that axes refer to.
    """
    number, letters = INSTRUCTIONS[call.spec.name]
    instr = Instr(op=number)
    for i, operand in enumerate(call.spec.operands):
        tensor = call.tensors.get(operand.name)
        instr.operand[i] = -1 if tensor is None else place(tensor)
        if tensor is not None and operand.role is Role.STATE:
            instr.f16_state = int(tensor.dtype == "f16")
    for i, letter in enumerate(letters):
        dim = call.axes[letter]
        if isinstance(dim, str):
            if dim not in sizes:
                sizes.append(dim)
            dim = ~sizes.index(dim)
        instr.axis[i] = dim
    for i, name in enumerate(call.spec.attrs):
        instr.attr[i] = float(call.attrs[name])
    if len(sizes) > MAX_SIZES:
        raise UnsupportedError("step sizes of a program", expected=f"at most {MAX_SIZES}", got=sizes)
    return instr


def _check(call: OpCall) -> None:
    if call.spec.name not in INSTRUCTIONS:
        raise UnsupportedError(f"no CPU kernel for {call}", expected=" ".join(INSTRUCTIONS))
    for o in call.spec.operands:
        tensor = call.tensors.get(o.name)
        if tensor is None:
            continue
        if o.role is Role.WEIGHT:
            allowed: tuple[str, ...] = tuple(FORMAT_CODES)
        elif o.role is Role.STATE:
            allowed = ("f32", "f16", "i32")
        elif tensor.kind is Kind.WEIGHT:
            continue  # converted to float32 when it is loaded
        else:
            allowed = ("f32", "i32", "u32", "u64")  # the kernels compute in float32
        if tensor.dtype not in allowed:
            raise UnsupportedError(
                f"dtype of {o.name} in {call} on the CPU", expected=" | ".join(allowed), got=str(tensor)
            )
    _check_state(call)


def _check_state(call: OpCall) -> None:
    """Raises UnsupportedError for a KV cache or a recurrent state that the kernels cannot walk."""
    if call.spec.name in RECURRENT:
        for o in call.spec.operands:
            if o.role is Role.STATE and call.tensors[o.name].dtype != "f32":
                raise UnsupportedError(
                    f"dtype of {o.name} in {call} on the CPU", expected="f32", got=str(call.tensors[o.name])
                )
        width = call.axes.get("V", TILE)
        if not isinstance(width, int) or width % TILE:
            raise UnsupportedError(
                f"{call} on the CPU", expected=f"a value head size V that is a multiple of {TILE}", got=width
            )
    size = call.axes.get("S"), call.axes.get("D")
    paged = any(o.role is Role.STATE and len(o.axes) == 6 for o in call.spec.operands)
    if paged and any(not isinstance(n, int) or n % TILE for n in size):
        raise UnsupportedError(
            f"{call} on the CPU", expected=f"block size S and head size D multiples of {TILE}", got=size
        )
