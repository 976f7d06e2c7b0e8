"""Packing: every value finds its way into the tiles and out again, in any row order."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.lower.cpu.packed import PackedWeight, packed_bytes, reserve
from pegainfer.ops.quantize import quantize
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.formats import FORMATS as FORMATS_OF_FILES
from pegainfer.runtime.weights.part import Part
from pegainfer.runtime.weights.safetensors import open_safetensors
from pegainfer.runtime.weights.weight import Weight, in_memory, plain
from tests.cpu.kernels.harness import FORMATS, SUPERBLOCKS, WIDE_GROUPS, WORDS
from tests.support.modelfiles import safetensors_file

NARROW = ((1, 32), (16, 64), (17, 96), (100, 32), (33, 608))
WIDE = ((1, 256), (16, 512), (37, 1280))


def pack(weight: Weight, threads: int = 1) -> PackedWeight:
    return PackedWeight(weight, reserve(packed_bytes(weight.scheme.name, weight.shape)), threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*product((*FORMATS, *WORDS), NARROW), *product((*SUPERBLOCKS, *WIDE_GROUPS), WIDE)],
)
def test_values_come_back_bit_for_bit(dtype: str, shape: tuple[int, int], threads: int) -> None:
    rng = np.random.default_rng(1)
    data = quantize(dtype, rng.standard_normal(shape).astype(np.float32))
    want = dequantize(dtype, data, shape)
    weight = in_memory(dtype, shape, data)
    packed = pack(weight, threads)
    assert packed.unpack().tobytes() == want.tobytes()
    order = rng.permutation(shape[0])
    moved = pack(weight.take(0, [range(i, i + 1) for i in order.tolist()]), threads)
    assert moved.unpack().tobytes() == want[order].tobytes()
    assert moved.unpack(shape[0] - 1, 1).tobytes() == want[order][-1:].tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *product((*FORMATS, *WORDS), ((3, 17, 96), (5, 16, 32))),
        *product((*SUPERBLOCKS, *WIDE_GROUPS), ((2, 19, 256),)),
    ],
)
def test_each_matrix_of_a_stack_begins_a_tile(dtype: str, shape: tuple[int, ...], threads: int) -> None:
    data = quantize(dtype, np.random.default_rng(3).standard_normal(shape).astype(np.float32))
    stack = in_memory(dtype, shape, data)
    packed = pack(stack, threads)
    want = dequantize(dtype, data, shape).reshape(-1, shape[-1])
    assert packed.unpack().tobytes() == want.tobytes()
    assert packed.unpack(shape[1], 1).tobytes() == want[shape[1]].tobytes(), "the second matrix's first row"
    each = [pack(matrix) for matrix in stack.matrices()]
    assert packed.nbytes == sum(one.nbytes for one in each)


@pytest.mark.parametrize("dtype", (*FORMATS, *SUPERBLOCKS))
def test_memory_is_that_of_the_file(dtype: str) -> None:
    """The 6-bit scales of q4_k and q5_k become bytes: up to 3%. q2_k and q3_k become nibbles."""
    shape = (1536, 576 if dtype in FORMATS else 768)
    data = quantize(dtype, np.ones(shape, np.float32))
    packed = pack(in_memory(dtype, shape, data))
    most = {"q4_k": 1.03, "q5_k": 1.03, "iq4_xs": 1.09, "q2_k": 1.77, "q3_k": 1.35}.get(dtype, 1.02)
    assert data.nbytes <= packed.nbytes <= most * data.nbytes


@pytest.mark.parametrize("dtype", SUPERBLOCKS)
def test_random_superblocks(dtype: str) -> None:
    """Every bit of a block counts: any bytes, but for finite scales, mean what the dequantiser says."""
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (34, FORMATS_OF_FILES[dtype].bytes), np.uint8)
    halves = {"q6_k": (208,), "q2_k": (80, 82), "q3_k": (108,), "iq4_xs": (0,)}.get(dtype, (0, 2))
    for at in halves:
        blocks[:, at : at + 2] = rng.standard_normal((34, 1)).astype("<f2").view(np.uint8)
    got = pack(in_memory(dtype, (17, 512), blocks.reshape(-1))).unpack()
    np.testing.assert_array_equal(got, dequantize(dtype, blocks.reshape(-1), (17, 512)))


def test_random_bits_of_half_precision() -> None:
    """All 65,536 float16 and bf16 patterns, NaN and denormals among them."""
    data = np.arange(65536, dtype="<u2").view(np.uint8)
    for dtype in ("f16", "bf16"):
        got = pack(in_memory(dtype, (256, 256), data)).unpack()
        np.testing.assert_array_equal(got, dequantize(dtype, data, (256, 256)))


def test_what_does_not_fit_is_refused() -> None:
    data = np.zeros(16 * 64 * 4, np.uint8)
    with pytest.raises(UnsupportedError, match="iq3_s"):
        pack(in_memory("iq3_s", (16, 256), np.zeros(16 * 110, np.uint8)))
    with pytest.raises(OpError, match="a multiple of 32"):
        packed_bytes("q8_0", (16, 63))
    with pytest.raises(OpError, match="expected 4096 bytes, aligned; got 4095"):
        PackedWeight(in_memory("f32", (16, 64), data), reserve(4095))
    with pytest.raises(OpError, match="matrix"):
        pack(in_memory("f32", (1024,), data))


def resident_bytes(path: Path) -> int:
    """Of this process's mappings of a file."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            ours = line.endswith(str(path))
        elif ours and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_packing_leaves_no_page_of_the_file_in_the_process(tmp_path: Path) -> None:
    """A model takes its packed size, and not that of its file besides."""
    values = np.random.default_rng(5).standard_normal((1024, 1024)).astype("<f4")
    names = [f"experts.{i}" for i in range(4)]
    data = {name: ("F32", values.shape, values.tobytes()) for name in names}
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_file(data))
    with open_safetensors(path) as file:
        stack = Weight(plain("f32"), (4, 1024, 1024), {"values": Part.stacked([file.part(n) for n in names])})
        assert stack.values().nbytes == 4 * values.nbytes
        assert resident_bytes(path) > 3 * values.nbytes  # read through the mapping
        packed = pack(stack, 2)
        assert resident_bytes(path) < 1 << 20
        assert packed.unpack(2048, 1).tobytes() == values[0].tobytes()
        assert stack.values()[3].tobytes() == values.tobytes()  # and it can be read again
