"""Weights as values: parts, slices and shards of every kind of scheme; what cannot be cut is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError, OpError, UnsupportedError
from pegainfer.ops.quantize import quantized_weight
from pegainfer.runtime.weights.part import Extent, Memory, Part
from pegainfer.runtime.weights.weight import Scheme, Shard, Weight, float32, in_memory, plain
from tests.support.schemes import (
    AWQ_ORDER,
    E2M1,
    E4M3,
    SCHEMES,
    awq,
    fp8_blocks,
    int4,
    seeded,
    stored_parts,
    weight_of,
)

Array = np.ndarray[Any, Any]
N, K = 64, 128
SHAPES = [(N, K), (3, N, K)]


def test_fp8_tiles_decode_as_published() -> None:
    """Value times the scale of its 16 x 32 tile; the last tile may be narrower."""
    assert E4M3[[0x38, 0x40, 0xB8, 0x01, 0x7E]].tolist() == [1, 2, -1, 2**-9, 448]
    scheme, shape = fp8_blocks(16, 32), (20, 40)
    parts = stored_parts(scheme, shape, 0)
    assert parts["scales"][1].shape == (2, 2)
    got = weight_of(scheme, shape, parts).values()
    for n, k in ((0, 0), (15, 31), (16, 31), (19, 39)):
        assert got[n, k] == E4M3[parts["values"][1][n, k]] * parts["scales"][1][n // 16, k // 32]


def test_awq_decodes_as_published() -> None:
    """Nibble i of word c is output 8c + order[i]; (q - z) · s with the group's zero and scale."""
    parts = stored_parts(awq(32), (N, K), 0)
    words, zeros, scales = (parts[name][1] for name in ("values", "zeros", "scales"))
    got = weight_of(awq(32), (N, K), parts).values()
    for n, k in ((0, 0), (1, 0), (13, 100), (63, 127)):
        shift = 4 * AWQ_ORDER.index(n % 8)
        q, z = (int(w) >> shift & 15 for w in (words[k, n // 8], zeros[k // 32, n // 8]))
        assert got[n, k] == np.float32((q - z) * np.float32(scales[k // 32, n]))


def test_zero_points_packed_along_the_outputs() -> None:
    parts = stored_parts(int4(32), (N, K), 0)
    words, zeros = parts["values"][1], parts["zeros"][1]
    scales = (parts["scales"][1].astype(np.uint32) << 16).view(np.float32)
    got = weight_of(int4(32), (N, K), parts).values()
    for n, k in ((0, 0), (1, 7), (13, 100), (63, 127)):
        q, z = int(words[n, k // 8]) >> 4 * (k % 8) & 15, int(zeros[n // 8, k // 32]) >> 4 * (n % 8) & 15
        assert got[n, k] == np.float32((q - z) * scales[n, k // 32])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=[s.name for s in SCHEMES])
def test_a_slice_has_the_values_of_the_slice(scheme: Scheme, shape: tuple[int, ...]) -> None:
    weight = seeded(scheme, shape, 0)
    whole = weight.values()
    assert whole.shape == shape and len(np.unique(whole)) > 20
    for axis in range(len(shape)):
        multiple = scheme.multiple("ENK"[axis - len(shape)])
        ranges = [range(shape[axis] - multiple, shape[axis]), range(0, multiple)]
        if axis == len(shape) - 1:
            ranges = ranges[:1]
        if axis == len(shape) - 2 and scheme.name.startswith("awq"):
            ranges = ranges[:1]  # its outputs lie along the last axis
        chosen = [i for r in ranges for i in r]
        got = weight.take(axis, ranges)
        np.testing.assert_array_equal(got.values(), np.take(whole, chosen, axis))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=[s.name for s in SCHEMES])
def test_shards_make_up_the_whole(scheme: Scheme, shape: tuple[int, ...]) -> None:
    weight = seeded(scheme, shape, 0)
    for axis, size in enumerate(shape):
        ranks = 3 if size == 3 else 2
        shards = [weight.shard_of(axis, rank, ranks) for rank in range(ranks)]
        assert [s.shard for s in shards] == [Shard(axis, rank, ranks) for rank in range(ranks)]
        np.testing.assert_array_equal(np.concatenate([s.values() for s in shards], axis), weight.values())
        # A shard holds its share of each part; one value a matrix is everybody's.
        for name, part in weight.parts.items():
            shared = name == "scales" and scheme.name == "fp8_tensor" and axis >= len(shape) - 2
            assert [s.parts[name].nbytes for s in shards] == [part.nbytes // (1 if shared else ranks)] * ranks


@pytest.mark.parametrize("name", ["f32", "bf16", "q8_0", "q4_k"])
def test_plain_rows_in_any_order(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    weight = quantized_weight(name, values)
    whole = weight.values()
    np.testing.assert_array_equal(
        weight.take(0, [range(1, 6, 2), range(0, 6, 2)]).values(), whole[[1, 3, 5, 0, 2, 4]]
    )
    twice = weight.take(0, [range(1, 6, 2)]).take(0, [range(1, 3)]).take(1, [range(256, 512)])
    np.testing.assert_array_equal(twice.values(), whole[[3, 5], 256:])
    into = np.empty(twice.parts["values"].nbytes, np.uint8)
    twice.parts["values"].read(into)
    assert into.tobytes() == twice.parts["values"].bytes().tobytes()


def test_vectors_are_float32_for_programs() -> None:
    vector = quantized_weight("bf16", np.arange(12, dtype=np.float32))
    assert vector.dtype == "f32" and vector.scheme.name == "bf16"
    assert vector.values().tolist() == list(range(12))
    assert vector.shard_of(0, 1, 3).values().tolist() == [4, 5, 6, 7]
    assert quantized_weight("bf16", np.zeros((1, 12), np.float32)).dtype == "bf16"


def test_addresses_are_those_of_the_rows() -> None:
    data = np.arange(48, dtype=np.uint8)
    start = data.ctypes.data
    part = in_memory("u8", (6, 8), data).parts["values"]
    assert (part.addresses() - start).tolist() == [0, 8, 16, 24, 32, 40]
    moved = part.take(0, [range(1, 6, 2), range(0, 1)]).take(1, [range(2, 5)])
    assert (moved.addresses() - start).tolist() == [10, 26, 42, 2]
    assert moved.bytes().tolist() == [10, 11, 12, 26, 27, 28, 42, 43, 44, 2, 3, 4]


@pytest.mark.parametrize(
    ("scheme", "axis", "taken", "match"),
    [
        (fp8_blocks(16, 32), 0, range(8, 24), r"slice of axis 0 of a fp8_16x32 weight .*multiples of 16"),
        (fp8_blocks(16, 32), 1, range(0, 100), "multiples of 32"),
        (awq(32), 0, range(4, 12), "multiples of 8"),
        (int4(32), 0, range(0, 4), "multiples of 8"),
        (int4(32), 1, range(0, 64, 2), "multiples of 32"),
        (plain("q4_k"), 1, range(0, 32), "multiples of 256"),
        (plain("f32"), 0, range(0, 65), r"up to 64"),
        (plain("f32"), 1, range(0, 64, 2), "one unbroken range"),
    ],
)
def test_what_is_stored_together_is_not_cut(scheme: Scheme, axis: int, taken: range, match: str) -> None:
    shape = (N, 256) if scheme.name == "q4_k" else (N, K)
    with pytest.raises(OpError, match=match):
        seeded(scheme, shape, 0).take(axis, [taken])


def test_shards_that_do_not_divide_are_refused() -> None:
    weight = float32(np.zeros((6, 4), np.float32))
    with pytest.raises(OpError, match=r"shard 0 of axis 0 .*\[6, 4\]; expected a divisor of 6.*got 4 ranks"):
        weight.shard_of(0, 0, 4)
    with pytest.raises(OpError, match="a rank below it"):
        weight.shard_of(0, 2, 2)
    with pytest.raises(OpError, match="use a number of ranks that divides"):
        seeded(fp8_blocks(16, 32), (48, 32), 0).shard_of(0, 0, 2)


def test_parts_that_do_not_hold_the_shape_are_refused() -> None:
    with pytest.raises(ModelFileError, match=r"bytes of a f32 weight \[4, 4\]; expected 64; got 65"):
        in_memory("f32", (4, 4), np.zeros(65, np.uint8))
    with pytest.raises(ModelFileError, match="rows outside of their source; expected ≤ 63 bytes; got 64"):
        in_memory("f32", (4, 4), np.zeros(63, np.uint8))
    with pytest.raises(ModelFileError, match=r"width of a q8_0 array; expected a multiple of 32; got .*48"):
        in_memory("q8_0", (4, 48), np.zeros(1000, np.uint8))
    memory = Memory(np.zeros(64, np.uint8))
    with pytest.raises(ModelFileError, match="expected 4 rows of 16 bytes; got 3 of them"):
        Part("f32", (4, 4), (Extent(memory, 0, 3, 16, 16),))
    scheme = fp8_blocks(16, 32)
    parts = stored_parts(scheme, (N, K), 0)
    with pytest.raises(ModelFileError, match=r"scales of a fp8_16x32 .*expected \[4, 4\] in f32 or bf16"):
        weight_of(scheme, (N, K), {**parts, "scales": ("f32", parts["scales"][1][:2])})
    with pytest.raises(ModelFileError, match=r"got \[4, 4\] in f16"):
        weight_of(scheme, (N, K), {**parts, "scales": ("f16", parts["scales"][1].astype("<f2"))})
    with pytest.raises(OpError, match=r"expected \[K\], \[N, K\] or \[E, N, K\]"):
        Weight(plain("f32"), (2, 2, 2, 2), {})
    with pytest.raises(UnsupportedError, match="no decoder"):
        in_memory("iq3_s", (1, 256), np.zeros(110, np.uint8)).values()


def test_bytes_of_a_scheme() -> None:
    assert plain("q4_k").nbytes((4, 512)) == 4 * 2 * 144
    assert fp8_blocks(128, 128).nbytes((200, 256)) == 200 * 256 + 2 * 2 * 4
    assert awq(128).nbytes((2, 64, 256)) == 2 * (256 * 8 * 4 + 2 * 8 * 4 + 2 * 64 * 2)
    assert E2M1[7] == 6
