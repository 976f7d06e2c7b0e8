"""An op's door: what does not fit is refused with op, tensor, axis and both sizes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pegainfer.contract.errors import OpError
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.coarse import QKV_NORM_ROPE_APPEND
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import Builder
from pegainfer.ops.rope import ROPE
from pegainfer.ops.sample import ADJUST_LOGITS, TOKEN_LOGPROBS
from pegainfer.ops.spec import OpSpec, Role
from pegainfer.ops.tensor import Dim, Kind, Tensor

IDS = {"vocab_size": 4}


def tensor(name: str, *shape: Dim, dtype: str = "f32") -> Tensor:
    return Tensor(name, shape, dtype, Kind.INPUT)


def fitting(spec: OpSpec, **sizes: Dim) -> dict[str, Tensor]:
    """Tensors t_<operand> of these sizes for all required operands."""
    return {
        o.name: tensor(
            f"t_{o.name}", *(int(a) if a.isdigit() else sizes[a] for a in o.axes), dtype=o.dtypes[0]
        )
        for o in spec.operands
        if not o.optional
    }


def refused(spec: OpSpec, tensors: Mapping[str, Tensor | None], **attrs: object) -> str:
    with pytest.raises(OpError) as e:
        spec.bind(tensors, attrs)
    return str(e.value)


def test_axes_are_bound_to_sizes_and_symbols() -> None:
    tensors = fitting(LINEAR, T="T", N=3, K=5)
    assert LINEAR.bind(tensors, {}) == {"T": "T", "N": 3, "K": 5}


def test_an_axis_that_differs_names_op_axis_tensor_and_both_sizes() -> None:
    tensors = fitting(LINEAR, T="T", N=3, K=5) | {"w": tensor("wq", 3, 6)}
    assert refused(LINEAR, tensors) == "linear: axis K of w; expected 5; got 6 (wq: [3, 6] f32)"
    tensors = fitting(LINEAR, T="T", N=3, K=5) | {"a": tensor("h", "R", 5)}
    assert refused(LINEAR, tensors) == "linear: axis T of a; expected T; got R (h: [R, 5] f32)"


def test_rank_and_dtype() -> None:
    tensors = fitting(RMS_NORM, T=2, M=8)
    assert refused(RMS_NORM, tensors | {"weight": tensor("n", 1, 8)}, eps=1e-5) == (
        "rms_norm: rank of weight; expected ['M']; got n: [1, 8] f32"
    )
    assert refused(RMS_NORM, tensors | {"x": tensor("ids", 2, 8, dtype="i32")}, eps=1e-5) == (
        "rms_norm: dtype of x; expected f32 | f16 | bf16; got ids: [2, 8] i32"
    )


def test_missing_and_unknown_operands_and_attributes() -> None:
    tensors = fitting(RMS_NORM, T=2, M=8)
    assert "rms_norm: operand x is missing" in refused(RMS_NORM, tensors | {"x": None}, eps=1e-5)
    assert "unknown operand or attribute; expected ['out', 'weight', 'x']; got ['bias', 'gamma']" in refused(
        RMS_NORM, tensors | {"bias": tensor("b", 8)}, eps=1e-5, gamma=1
    )
    assert refused(RMS_NORM, tensors) == "rms_norm: attribute missing; expected ['eps']"


def test_a_weight_is_whole_blocks() -> None:
    tensors = fitting(LINEAR, T=1, N=3, K=40)
    got = refused(LINEAR, tensors | {"w": tensor("wk", 3, 40, dtype="q4_1")})
    assert got == "linear: width of w; expected a multiple of 32; got wk: [3, 40] q4_1"


def test_numbered_axes_are_themselves() -> None:
    sizes: dict[str, Dim] = {"T": 2, "H": 2, "D": 4, "N": 3, "Y": 1, "G": 1, "S": 4, "R": 1, "W": 2}
    tensors = fitting(ATTENTION, **sizes) | {"kv": tensor("kv", 3, 1, 3, 1, 4, 4)}
    assert "attention: axis 2 of kv; expected 2; got 3" in refused(ATTENTION, tensors, layer=0, scale=1.0)


@pytest.mark.parametrize(
    ("spec", "sizes", "attrs", "text"),
    [
        (ROPE, {"T": 2, "H": 1, "D": 7, "P": 9}, {}, "rope: sizes do not fit; expected D even"),
        (
            ATTENTION,
            {"T": 2, "H": 5, "D": 4, "N": 3, "Y": 1, "G": 2, "S": 4, "R": 1, "W": 2},
            {"layer": 0, "scale": 1.0},
            "attention: sizes do not fit; expected H a multiple of G",
        ),
        (TOKEN_LOGPROBS, {"L": 1, "V": 4, "K": 5}, IDS, "token_logprobs: sizes do not fit; expected K ≤ V"),
        (
            ADJUST_LOGITS,
            {"L": 1, "V": 32, "J": 0, "E": 1, "I": 2, "U": 0, "O": 0, "Z": 1, "X": 8},
            IDS,
            "adjust_logits: sizes do not fit; expected I ≤ ceil(V / 32)",
        ),
    ],
)
def test_sizes_that_must_agree(
    spec: OpSpec, sizes: dict[str, Dim], attrs: dict[str, object], text: str
) -> None:
    assert text in refused(spec, fitting(spec, **sizes), **attrs)


def test_optional_operands_may_be_left_out_and_are_checked_if_given() -> None:
    sizes: dict[str, Dim] = {"T": "T", "M": 8, "H": 2, "G": 1, "D": 4, "A": 8, "B": 4}
    sizes |= {"N": 3, "Y": 1, "S": 4, "P": 16}
    tensors = fitting(QKV_NORM_ROPE_APPEND, **sizes)
    attrs = {"eps": 1e-5, "layer": 0}
    assert QKV_NORM_ROPE_APPEND.bind({**tensors, "q_norm": None}, attrs)["D"] == 4
    got = refused(QKV_NORM_ROPE_APPEND, {**tensors, "q_norm": tensor("qn", 5)}, **attrs)
    assert "axis D of q_norm; expected 4; got 5" in got


def test_the_builder_refuses_at_the_call() -> None:
    b = Builder("p")
    x, w = b.input("x", "T", 5, dtype="f32"), b.weight("w", 3, 6, dtype="f32")
    with pytest.raises(OpError, match="linear: axis K of w"):
        b.emit(LINEAR, out=b.buffer("out", "T", 3), a=x, w=w)
    assert b.calls == []


def test_roles_of_the_declarations() -> None:
    assert LINEAR.operand("w").role is Role.WEIGHT and ROPE.operand("x").role is Role.INOUT
    assert not LINEAR.coarse and QKV_NORM_ROPE_APPEND.coarse
