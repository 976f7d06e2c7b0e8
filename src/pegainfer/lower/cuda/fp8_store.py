"""FP8 weights on the GPU: codes row by row, and scales apart from them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runtime.cuda.launch import Launch, i32, i64, ptr
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.cuda.upload import SLOT_BYTES, WorkItem
from pegainfer.runtime.weights.weight import VALUES, Weight

Array = np.ndarray[Any, Any]
GROUP = 128


class Fp8Target(NamedTuple):
    """Where one weight [N, K] goes.

    Args:
        codes, pitch: row i's codes go to `codes + i * pitch`.
        scales: address of row 0's first scale.
        step, across: scales from a row to the next, and from a group of columns to the next; 0: a row has
            one.
    """

    name: str
    shape: tuple[int, ...]
    codes: int
    pitch: int
    scales: int
    step: int
    across: int


def allocate_fp8(
    names: list[str], shapes: list[tuple[int, ...]], form: str
) -> tuple[DeviceTensor, DeviceTensor]:
    """Memory for the codes and scales of weights as one."""
    n, k = sum(shape[0] for shape in shapes), shapes[0][1]
    sizes = (n,) if form.startswith("fp8_r") else (k // GROUP, n)
    what = "weights " + " ".join(names)
    return DeviceTensor.empty((n, k), "f8_e4m3", what), DeviceTensor.empty(sizes, "f32", what)


def fp8_targets(
    names: list[str], shapes: list[tuple[int, ...]], codes: DeviceTensor, scales: DeviceTensor, layout: str
) -> list[Fp8Target]:
    """The targets of weights that are one, in a layout of WeightStore."""
    k, many = codes.shape[1], len(names) if layout == "pairs" else 1
    across = scales.shape[1] if len(scales.shape) == 2 else 0
    targets, row = [], 0
    for name, shape in zip(names, shapes, strict=True):
        targets.append(
            Fp8Target(name, shape, codes.address + row * k, k * many, scales.address + 4 * row, many, across)
        )
        row += 1 if layout == "pairs" else shape[0]
    return targets


class Fp8Loader:
    """Sends FP8 weights to the device. Work of one stream is in order, so one buffer serves it."""

    def __init__(self, ctx: CudaContext) -> None:
        self._ctx = ctx
        self._buffer: DeviceBuffer | None = None

    def work_items(self, weight: Weight, target: Fp8Target) -> list[WorkItem]:
        """Whole rows that fit a slot of the ring. Plain bf16 weights are quantised on the device."""
        n, k = target.shape
        plain = weight.parts[VALUES].format == "bf16"
        row_bytes = 2 * k if plain else k + 4 * (k // GROUP if target.across else 1)
        if row_bytes > SLOT_BYTES:
            raise OpError(f"a row of weight {target.name} is too long", expected=SLOT_BYTES, got=row_bytes)
        each = SLOT_BYTES // row_bytes
        multiple = 1 if plain else weight.scheme.multiple("N")
        items = []
        for first in range(0, n, each):
            count = min(each, n - first)
            read = _plain_reader(weight, first, count) if plain else _reader(weight, first, count, multiple)
            send = self._sender(target, first, count, plain)
            items.append(WorkItem(count * row_bytes, read, send, target.name))
        return items

    def quantize(self, target: Fp8Target, first: int, count: int, plain: int, stream: Stream) -> None:
        """Rows first … first + count out of bf16 on the device, contiguous at `plain`."""
        k = target.shape[1]
        args = (
            ptr(target.codes + first * target.pitch), i64(target.pitch),
            ptr(target.scales + 4 * first * target.step), i32(target.step), i32(target.across),
            ptr(plain), i32(k),
        )  # fmt: skip
        kernel = self._ctx.library.kernel("quantize_weight_bf16")
        threads = min(1024, -(-k // 256) * 32)
        Launch(kernel, (count, 1, 1), threads, args, label="quantize_weight")(stream)

    def make(self, target: Fp8Target, fill: Callable[[DeviceTensor, Stream], None], stream: Stream) -> None:
        """A weight of generated values, which `fill` puts into a bf16 tensor."""
        made = DeviceTensor.empty(target.shape, "bf16", f"dummy {target.name}")
        fill(made, stream)
        self.quantize(target, 0, target.shape[0], made.address, stream)
        stream.synchronize("weights")  # the memory of `made` is freed on return

    def _sender(
        self, target: Fp8Target, first: int, count: int, plain: bool
    ) -> Callable[[int, Stream], None]:
        k = target.shape[1]
        groups = k // GROUP if target.across else 1

        def send(host: int, stream: Stream) -> None:
            if self._buffer is None:
                self._buffer = DeviceBuffer(SLOT_BYTES, "FP8 weights")
            held = self._buffer.address
            if plain:
                stream.upload(held, host, 2 * count * k)
                self.quantize(target, first, count, held, stream)
                return
            stream.copy_rows(target.codes + first * target.pitch, target.pitch, host, k, k, count, host=True)
            stream.upload(held, host + count * k, 4 * groups * count)
            for g in range(groups):
                to = target.scales + 4 * (g * target.across + first * target.step)
                stream.copy_rows(to, 4 * target.step, held + 4 * g * count, 4, 4, count)

        return send


def _plain_reader(weight: Weight, first: int, count: int) -> Callable[[Array], None]:
    return lambda into: weight.take(0, [range(first, first + count)]).parts[VALUES].read(into)


def _reader(weight: Weight, first: int, count: int, multiple: int) -> Callable[[Array], None]:
    """Fills a slot with codes of rows first … first + count, then their scales, float32 [groups, count]."""
    n, k = weight.shape
    form = int(weight.dtype.rpartition("fp8_")[2][1:])
    by_rows = weight.dtype.startswith("fp8_r")

    def read(into: Array) -> None:
        # A scheme may store several rows together: those around are read as well.
        start, stop = first // multiple * multiple, min(n, -(-(first + count) // multiple) * multiple)
        raw = weight.take(0, [range(start, stop)]).in_form().parts[VALUES].bytes()
        words = raw.reshape(stop - start, k // form, 4 + form)[first - start : first - start + count]
        scales = np.ascontiguousarray(words[:, : 1 if by_rows else None, :4]).view("<f4")[:, :, 0]
        into[: count * k] = np.ascontiguousarray(words[:, :, 4:]).reshape(-1)
        into[count * k :] = np.ascontiguousarray(scales.T).reshape(-1).view(np.uint8)

    return read


def nbytes_of(shape: tuple[int, ...], form: str) -> int:
    """Bytes that a matrix takes on the device."""
    return prod(shape) + 4 * shape[0] * (shape[1] // GROUP if form.startswith("fp8_g") else 1)
