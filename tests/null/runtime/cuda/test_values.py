"""What crosses to the device byte by byte: arguments, bf16, tensors, staged slots, uploaded weights."""

from __future__ import annotations

import ctypes
import struct as c_struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.contract.errors import OpError
from pegainfer.runtime.bf16 import from_bf16, to_bf16
from pegainfer.runtime.cuda.launch import f32, i32, i64, pack, ptr, struct
from pegainfer.runtime.cuda.layout import Layout
from pegainfer.runtime.cuda.memory import StagingRing
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor, row_major
from pegainfer.runtime.cuda.tma import TensorMap
from pegainfer.runtime.cuda.upload import WorkItem, upload
from tests.support.fake_cuda import fake_cuda

Array = np.ndarray[Any, Any]


def test_arguments_are_addresses_of_values_of_their_own_width() -> None:
    array, held = pack([ptr(0x7000_0000_1234), i32(-5), f32(0.5), i64(-(1 << 40))])
    kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_int64)
    values = [kind.from_address(address).value for kind, address in zip(kinds, array, strict=True)]
    assert values == [0x7000_0000_1234, -5, 0.5, -(1 << 40)] and len(held) == 4


def test_a_struct_is_laid_out_as_c_does() -> None:
    layout = Layout("S", "", "int a\nfloat* p\nint b\nfloat x\nint c\nint64_t d")
    assert struct(layout, d=6, c=5, x=4.0, b=3, p=2, a=1).value.data == c_struct.pack(
        "@iPifiq", 1, 2, 3, 4.0, 5, 6
    )
    assert struct(Layout("S", "", "void* p\nint a"), p=None, a=2).value.data == c_struct.pack("@Pi4x", 0, 2)
    array, _ = pack([struct(Layout("S", "", "int a\nint b"), a=7, b=8)])
    assert (ctypes.c_int32 * 2).from_address(array[0])[:] == [7, 8]


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        OpError, match="kernel argument out of range; expected 32 bits, signed; got 2147483648"
    ):
        i32(1 << 31)


@given(st.lists(st.floats(width=32), min_size=1))
def test_bf16_rounds_to_nearest_even_and_keeps_nan(values: list[float]) -> None:
    x = np.array(values, np.float32)
    got = from_bf16(to_bf16(x))
    for value, rounded in zip(x, got, strict=True):
        if np.isnan(value):
            assert np.isnan(rounded)
            continue
        bits = int(np.float32(value).view(np.uint32))
        low, high = (
            np.uint32(b & 0xFFFFFFFF).view(np.float32) for b in (bits & ~0xFFFF, (bits & ~0xFFFF) + 0x10000)
        )
        down, up = abs(float(value) - float(low)), abs(float(high) - float(value))
        if np.isfinite(high) and np.isfinite(value):
            even = low if (bits >> 16) % 2 == 0 else high
            assert rounded == (low if down < up else high if up < down else even)


def test_tensors_know_their_strides_and_come_back_as_they_went() -> None:
    with fake_cuda():
        stream = Stream()
        values = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
        t = DeviceTensor.from_numpy(values, "bf16", stream)
        assert (t.nbytes, t.strides, t.contiguous) == (24, (4, 1), True)
        assert np.array_equal(t.numpy(stream), values)
        column = DeviceTensor(t.address, (3,), "bf16", (4,))
        with pytest.raises(OpError, match="only a contiguous tensor can be read"):
            column.numpy(stream)
    assert row_major((2, 3, 4)) == (12, 4, 1) and row_major(()) == ()


def test_rows_are_copied_with_a_pitch() -> None:
    with fake_cuda():
        stream = Stream()
        target = DeviceTensor.from_numpy(np.zeros((4, 2), np.int32), "i32", stream)
        source = np.array([[1, 2], [3, 4]], np.int32)
        stream.copy_rows(target.address + 8, 16, source.ctypes.data, 8, 8, 2, host=True)
        assert target.numpy(stream).tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]


def test_a_slot_of_the_ring_waits_for_its_last_copy() -> None:
    with fake_cuda() as fake:
        ring, stream = StagingRing(2, 100, "inputs"), Stream()
        seen = []
        for _ in range(4):
            number, address, view = ring.take()
            seen.append((number, fake.calls["cuEventSynchronize"]))
            assert (len(view), address % 64) == (100, view.ctypes.data % 64)
            ring.sent(stream)
        assert seen == [(0, 0), (1, 0), (0, 1), (1, 2)]


def test_small_pieces_share_a_slot_until_it_is_full() -> None:
    with fake_cuda() as fake:
        ring, stream = StagingRing(2, 1000, "histories"), Stream()
        seen = []
        for fill, nbytes in enumerate((100, 500, 300, 1000, 8)):
            address, view = ring.room(nbytes)
            view[:] = fill
            ring.sent(stream)
            seen.append((address, len(view), fake.calls["cuEventSynchronize"]))
        first = seen[0][0]
        # 256 and 768 are where a piece may begin; the fourth fills a slot, the last one waits for the first.
        assert [(a - first, n, waits) for a, n, waits in seen] == [
            (0, 100, 0), (256, 500, 0), (1024, 300, 0), (0, 1000, 1), (1024, 8, 2)
        ]  # fmt: skip


def test_descriptors_refuse_what_the_copy_engine_cannot_do() -> None:
    with pytest.raises(OpError, match=r"does not fit a TMA descriptor; .*got strides \(20,\) B"):
        TensorMap(0, 4, 10, "bf16", (4, 8))
    with pytest.raises(OpError, match="does not fit a TMA descriptor"):
        TensorMap(0, 4, 128, "bf16", (4, 128))  # wider than the swizzle


def test_upload_reads_in_parallel_and_sends_every_piece() -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    with fake_cuda():
        stream = Stream()
        target = DeviceTensor.empty((10_000,), "u8")
        pieces = [
            WorkItem(
                100,
                lambda into, at=at: np.copyto(into, data[at : at + 100]),
                lambda host, s, at=at: s.upload(target.address + at, host, 100),
                "weights",
            )
            for at in range(0, 10_000, 100)
        ]
        done: list[int] = []
        upload(pieces, stream, lambda sent, total: done.append(sent), readers=3)
        assert np.array_equal(target.numpy(stream), data)
        assert done[-1] == 10_000 and done == sorted(done)


def test_upload_raises_what_a_reader_raises() -> None:
    def short(into: Array) -> None:
        raise OSError("file ends at byte 50")

    with fake_cuda():
        piece = WorkItem(100, short, lambda host, stream: None, "weights")
        with pytest.raises(OSError, match="file ends at byte 50"):
            upload([piece] * 30, Stream(), readers=2)
