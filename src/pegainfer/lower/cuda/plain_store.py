"""Weights on the GPU in plain dtypes: where rows go, and their conversion on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runtime.cuda.launch import Launch, i64, ptr
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import item_bytes
from pegainfer.runtime.cuda.upload import SLOT_BYTES, WorkItem
from pegainfer.runtime.weights.weight import VALUES, Weight

Array = np.ndarray[Any, Any]
PLAIN = ("f32", "f16", "bf16")
FILL_BLOCKS = 1024


class Target(NamedTuple):
    """Where one weight goes: row i of it (its leading axes flattened) to `address + i * pitch`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    address: int
    pitch: int

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.shape[-1] * item_bytes(self.dtype)


class Conversion:
    """Converts work items on the device. Work of one stream is in order, so one buffer serves all work items
    of a stream."""

    def __init__(self, ctx: CudaContext) -> None:
        self._ctx = ctx

    @cached_property
    def buffer(self) -> DeviceBuffer:
        return DeviceBuffer(3 * SLOT_BYTES, "weights conversion")

    def __call__(
        self, stream: Stream, host: int, source: str, target: Target, address: int, rows: int
    ) -> None:
        """Sends `rows` rows of dtype `source` from the host to `address`, in the target's dtype."""
        raw, out = self.buffer.address, self.buffer.address + SLOT_BYTES
        count = rows * target.shape[-1]
        stream.upload(raw, host, count * item_bytes(source))
        kernel = self._ctx.library.kernel(f"convert_{source}_{target.dtype}")
        args = (ptr(out), ptr(raw), i64(count))
        Launch(kernel, (FILL_BLOCKS, 1, 1), 256, args, label="convert")(stream)
        stream.copy_rows(address, target.pitch, out, target.width, target.width, rows)


def work_items(weight: Weight, target: Target, convert: Conversion) -> list[WorkItem]:
    """The work items that bring a weight to the device: whole rows that fit a slot of the ring."""
    source = weight.scheme.name if weight.scheme.name in PLAIN else "f32"  # as it lies in the slot
    row_bytes = target.shape[-1] * item_bytes(source)
    if row_bytes > SLOT_BYTES:
        raise OpError(f"a row of weight {target.name} is too long", expected=SLOT_BYTES, got=row_bytes)
    items, address = [], target.address
    for matrix in weight.matrices():
        for first in range(0, matrix.shape[0], SLOT_BYTES // row_bytes):
            count = min(SLOT_BYTES // row_bytes, matrix.shape[0] - first)
            read = _reader(matrix, first, count)
            send = _sender(target, source, address, count, convert)
            items.append(WorkItem(count * row_bytes, read, send, target.name))
            address += count * target.pitch
    return items


def _sender(
    target: Target, source: str, address: int, rows: int, convert: Conversion
) -> Callable[[int, Stream], None]:
    def direct(host: int, stream: Stream) -> None:
        if target.pitch == target.width:
            stream.upload(address, host, rows * target.width)
        else:
            stream.copy_rows(address, target.pitch, host, target.width, target.width, rows, host=True)

    def converted(host: int, stream: Stream) -> None:
        convert(stream, host, source, target, address, rows)

    return direct if source == target.dtype else converted


def _reader(matrix: Weight, first: int, count: int) -> Callable[[Array], None]:
    """Fills a slot with rows first … first + count; quantised ones as float32."""

    def copied(into: Array) -> None:
        matrix.take(0, [range(first, first + count)]).parts[VALUES].read(into)

    def expanded(into: Array) -> None:
        # A scheme may store several rows together: those around are decoded as well.
        rows, multiple = matrix.shape[0], matrix.scheme.multiple("N")
        start, stop = first // multiple * multiple, min(rows, -(-(first + count) // multiple) * multiple)
        values = matrix.take(0, [range(start, stop)]).values()
        into.view(np.float32).reshape(count, -1)[...] = values[first - start : first - start + count]

    return copied if matrix.scheme.name in PLAIN else expanded
