"""Schemes of quantised checkpoints: exactly what their writers mean, whole and in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import OpError
from pegainfer.ops.quantization import read_quantization
from pegainfer.runtime.weights.checkpoints import Scheme, awq, fp4, gptq, packed_ints, plain_ints
from pegainfer.runtime.weights.fields import Fields
from pegainfer.runtime.weights.formats import SAFETENSORS_DTYPES
from pegainfer.runtime.weights.fp8_checkpoints import fp8_scheme
from pegainfer.runtime.weights.part import Memory, Part
from pegainfer.runtime.weights.safetensors import SafetensorsFile
from pegainfer.runtime.weights.weight import Weight
from tests.support import packers

Array = np.ndarray[Any, Any]
GOLDEN = Path(__file__).parents[3] / "data" / "weights" / "checkpoints.safetensors"
# By the golden file's names, which tests/golden/cut_checkpoints.py explains: 16 rows of 128 columns.
WRITTEN = {
    "awq_gemm": awq(32),
    "gptq_v1_sym": gptq(4, 32, act_order=False, offset=1),
    "gptq_v1_asym_desc_act": gptq(4, 32, act_order=True, offset=1),
    "gptq_v2_asym": gptq(4, 32, act_order=False, offset=0),
    "ct_w4a16_sym": packed_ints(4, 32, symmetric=True, act_order=False),
    "ct_w4a16_asym": packed_ints(4, 32, symmetric=False, act_order=False),
    "ct_w8a8_int8": plain_ints(None, symmetric=True),
    "ct_nvfp4": fp4("nvfp4"),
    "fp8_block": fp8_scheme(128, 128, ".weight_scale_inv"),
    "ct_fp8_dynamic": fp8_scheme(1, None),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_decodes_what_the_writers_libraries_packed(name: str) -> None:
    scheme, shape = WRITTEN[name], (16, 128)
    with SafetensorsFile(GOLDEN) as file:
        want = file.part(f"{name}.decoded").bytes().view("<f4").reshape(shape)
        parts = {p.name: file.part(name + p.suffix).reshape(p.shape(shape)) for p in scheme.parts}
        np.testing.assert_array_equal(Weight(scheme, shape, parts).values(), want)


def scheme_of(kind: str) -> Scheme:
    config = packers.KINDS[kind].config
    read = read_quantization(Fields({"quantization_config": config}, "config.json", line="a line"))
    assert read is not None
    found = read.scheme_for("model.layers.0.mlp.up_proj")
    assert found is not None
    return found


def weight_of(kind: str, w: Array) -> tuple[Weight, Array]:
    """A matrix stored in this way, and what its packer says that it means."""
    scheme, packed = scheme_of(kind), packers.KINDS[kind].pack(w)
    parts = {}
    for p in scheme.parts:
        dtype, array = packed.tensors[p.suffix]
        memory = Memory(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        parts[p.name] = Part.at(SAFETENSORS_DTYPES[dtype], array.shape, memory, 0).reshape(p.shape(w.shape))
    return Weight(scheme, w.shape, parts), packed.values


def matrix(n: int = 48, k: int = 192) -> Array:
    return np.random.default_rng(n).standard_normal((n, k), np.float32)


@pytest.mark.parametrize("kind", packers.KINDS)
def test_values_and_internal_form(kind: str) -> None:
    weight, want = weight_of(kind, matrix())
    np.testing.assert_array_equal(weight.values(), want)
    form = weight.in_form()
    expected = packers.KINDS[kind].form
    assert weight.dtype == form.scheme.name == ("int8_g64" if expected == "int8" else expected)
    if expected == "f16":
        want = want.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(form.values(), want)


@pytest.mark.parametrize("kind", packers.KINDS)
def test_slices_are_those_of_the_values(kind: str) -> None:
    weight, want = weight_of(kind, matrix())
    rows = weight.take(0, [range(16, 40)])
    np.testing.assert_array_equal(rows.values(), want[16:40])
    assert rows.in_form().shape == (24, 192)
    if "act_order" in kind:
        with pytest.raises(OpError, match="act order cannot be divided along its inputs"):
            weight.take(1, [range(64, 128)]).values()
    elif kind not in ("w8a8", "w8a8_asym"):
        np.testing.assert_array_equal(weight.take(1, [range(64, 128)]).values(), want[:, 64:128])
    else:
        np.testing.assert_array_equal(weight.shard_of(1, 1, 3).values(), want[:, 64:128])


def test_a_wider_group_becomes_the_widest_form_that_divides_it() -> None:
    w = matrix(16, 768)
    for group, form in ((256, "int4_g128"), (96, "int4_g32"), (64, "int4_g64")):
        packed = packers.ct_packed(w, group=group)
        scheme = packed_ints(4, group, symmetric=True, act_order=False)
        parts = {}
        for p in scheme.parts:
            dtype, array = packed.tensors[p.suffix]
            memory = Memory(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            parts[p.name] = Part.at(SAFETENSORS_DTYPES[dtype], array.shape, memory, 0)
        weight = Weight(scheme, w.shape, parts)
        assert weight.dtype == form
        np.testing.assert_array_equal(weight.in_form().values(), packed.values)


def test_a_stack_keeps_its_matrices() -> None:
    each = [weight_of("w4a16_asym", matrix(n)) for n in (48, 48)]
    parts = {name: Part.stacked([w.parts[name] for w, _ in each]) for name in each[0][0].parts}
    stack = Weight(each[0][0].scheme, (2, 48, 192), parts)
    want = np.stack([values for _, values in each])
    np.testing.assert_array_equal(stack.values(), want)
    np.testing.assert_array_equal(stack.in_form().values(), want)


def test_scales_of_more_digits_lose_the_word_s_low_byte() -> None:
    """A float32 scale is rounded to 16 bits of fraction, and never into the zero point."""
    scale = np.array([[1.2345678, -0.3333333]], np.float32)
    levels = np.full((1, 64), 3, np.uint8)
    from pegainfer.runtime.weights.grouped import pack_int
    from pegainfer.runtime.weights.weight import in_memory

    raw = pack_int(4, 32, levels, scale, np.array([[15, 0]], np.uint8))
    got = in_memory("int4_g32", (1, 64), raw).values().reshape(2, 32)
    want = np.array([-12, 3]) * scale[0].astype(np.float64)
    assert (np.abs(got - want[:, None]) <= 2.0**-16 * np.abs(want[:, None])).all()
