"""From a recorded program to the instructions of csrc/program.h."""

from __future__ import annotations

import struct
from collections.abc import Callable

from pegainfer.contract.errors import UnsupportedError
from pegainfer.kernels.cpu.instructions import OPCODES, axis_letters
from pegainfer.lower.cpu.packed import FORMAT_CODES
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.spec import Operand, Role
from pegainfer.ops.tensor import Dim, Kind, Tensor

RECURRENT = ("causal_conv_silu", "gated_delta_rule")
KV_FORMATS = {"f32": 0, "f16": 1, "f8_e4m3": 2, "bf16": 3}  # as csrc/formats.h numbers them
TILE = 16  # output rows of a packed weight's tile


def runs_whole(call: OpCall) -> bool:
    """Whether a coarse call has a kernel of its own; it is lowered otherwise."""
    if call.spec.name == "qkv_norm_rope_append":
        head_dim = call.axes["D"]  # a unit of that kernel is a head, and must be whole tiles
        return isinstance(head_dim, int) and head_dim % TILE == 0
    return call.spec.name in OPCODES


def lowered(program: Program, ranks: int = 1) -> Program:
    """The program of one of `ranks` ranks in ops that have kernels.

    Raises UnsupportedError with the reason where an op has none.
    """
    low = program.lowered(keep=runs_whole, ranks=ranks)
    for call in low.calls:
        _check(call)
    return low


def encode(call: OpCall, number: int, place: Callable[[Tensor], int], sizes: list[str]) -> bytes:
    """One instruction, in words of eight bytes.

    Args:
        number: of its op, as in OPCODES.
        place: a tensor's number in the table of addresses.
        sizes: collects the names of step sizes that axes refer to.
    """
    spec = call.spec
    tensors = [call.tensors.get(o.name) for o in spec.operands]
    operands = [-1 if t is None else place(t) for t in tensors]
    states = [t for o, t in zip(spec.operands, tensors, strict=True) if o.role is Role.STATE and t]
    kv_format = max((KV_FORMATS.get(t.dtype, 0) for t in states), default=0)
    axes = [_axis(call.axes[letter], sizes) for letter in axis_letters(spec)]
    attrs = [float(call.attrs[name]) for name in spec.attrs]
    words = [number, kv_format, *operands, *axes]
    return struct.pack(f"={len(words)}q{len(attrs)}d", *words, *attrs)


def _axis(dim: Dim, sizes: list[str]) -> int:
    """A size as it is, or the complement of a step size's number."""
    if isinstance(dim, int):
        return dim
    if dim not in sizes:
        sizes.append(dim)
    return ~sizes.index(dim)


def _check(call: OpCall) -> None:
    if call.spec.name not in OPCODES:
        raise UnsupportedError(f"no CPU kernel for {call}", expected=" ".join(OPCODES))
    for o in call.spec.operands:
        tensor = call.tensors.get(o.name)
        if tensor is None:
            continue
        if o.role is Role.WEIGHT:
            allowed: tuple[str, ...] = tuple(FORMAT_CODES)
        elif o.role is Role.STATE:
            allowed = _state_formats(call, o)
        elif tensor.kind is Kind.WEIGHT:
            continue  # converted to float32 when it is loaded
        else:
            allowed = ("f32", "i32", "u32", "u64")  # the kernels compute in float32
        if tensor.dtype not in allowed:
            raise UnsupportedError(
                f"dtype of {o.name} in {call} on the CPU", expected=" | ".join(allowed), got=str(tensor)
            )
    _check_state(call)


def _state_formats(call: OpCall, o: Operand) -> tuple[str, ...]:
    if call.spec.name in RECURRENT:
        return ("f32", "bf16") if o.name == "delta" else ("f32",)
    return ("f32", "f16", "i32", *(("f8_e4m3",) if o.paged else ()))


def _check_state(call: OpCall) -> None:
    """Raises UnsupportedError for a KV cache or a recurrent state that the kernels cannot walk."""
    if call.spec.name in RECURRENT:
        width = call.axes.get("V", TILE)
        if not isinstance(width, int) or width % TILE:
            raise UnsupportedError(
                f"{call} on the CPU", expected=f"a value head size V that is a multiple of {TILE}", got=width
            )
    if any(o.paged for o in call.spec.operands) and call.spec.name != "latent_append":
        # A cache of latents has no KV heads; the first K channels of its rows are added up in vectors.
        letters = "SD" if "G" in call.axes else "SK"
        size = [call.axes.get(letter) for letter in letters]
        if any(not isinstance(n, int) or n % TILE for n in size):
            what = "head size D" if letters == "SD" else "latent rank K"
            raise UnsupportedError(
                f"{call} on the CPU", expected=f"block size S and {what} multiples of {TILE}", got=size
            )
