"""Dequantisation against values that the gguf package made (tests/golden/make_dequant.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.runtime.weights.dequant import SLAB_ELEMENTS, dequantize
from pegainfer.runtime.weights.formats import FORMATS, GGML_TYPES

ORACLE = json.loads((Path(__file__).parents[3] / "data" / "weights" / "dequant.json").read_text())
CASES = ORACLE["cases"]


def raw_of(name: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(CASES[name]["raw"]), np.uint8)


@pytest.mark.parametrize("name", sorted(CASES))
def test_equals_the_oracle_bit_for_bit(name: str) -> None:
    case = CASES[name]
    expected = np.frombuffer(bytes.fromhex(case["float32"]), "<u4").reshape(case["shape"])
    got = dequantize(name, raw_of(name), tuple(case["shape"]))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), expected)


@pytest.mark.parametrize("name", sorted(CASES))
def test_slabs_join_without_a_seam(name: str) -> None:
    """A tensor longer than a slab, with a ragged tail, gives each block the values it has alone."""
    shape = CASES[name]["shape"]
    block = FORMATS[name]
    alone = dequantize(name, raw_of(name), tuple(shape)).reshape(-1)
    times = SLAB_ELEMENTS // alone.size + 2
    many = dequantize(
        name, np.tile(raw_of(name), times), (alone.size * times // block.elements, block.elements)
    )
    np.testing.assert_array_equal(many.reshape(times, -1), np.broadcast_to(alone, (times, alone.size)))


def test_non_finite_scales_pass_through_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    block = np.concatenate([np.array([np.inf, 0], "<f2").view(np.uint8), np.full(16, 0x18, np.uint8)])
    got = dequantize("q4_1", block, (32,))
    assert np.isposinf(got).all()
    assert not recwarn.list


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(ModelFileError, match=r"expected 20; got 18"):
        dequantize("q4_1", np.zeros(18, np.uint8), (32,))
    with pytest.raises(ModelFileError, match="do not fit the shape"):
        dequantize("q8_0", np.zeros(34, np.uint8), (31,))


def test_a_known_format_without_decoder_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"expected f32 .* got iq3_s"):
        dequantize("iq3_s", np.zeros(110, np.uint8), (256,))


def test_every_ggml_type_has_a_block_size() -> None:
    assert set(GGML_TYPES.values()) <= set(FORMATS)
    assert all(FORMATS[n].nbytes(FORMATS[n].elements * 3) == 3 * FORMATS[n].bytes for n in FORMATS)
