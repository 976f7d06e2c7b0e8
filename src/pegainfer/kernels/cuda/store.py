"""A model's weights on the GPU, in the layouts that the kernels read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.ops.tensor import FORMATS, Tensor
from pegainfer.runtime.cuda.launch import Launch, f32, i64, ptr
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor, item_bytes
from pegainfer.runtime.cuda.upload import SLOT_BYTES, Piece, Progress, read_span, upload
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.raw import RawWeight

Array = np.ndarray[Any, Any]
PLAIN = ("f32", "f16", "bf16")
FILL_BLOCKS = 1024


@dataclass(frozen=True)
class Dummy:
    """Weights made on the device instead of read: seeded normals that keep activations of order one.

    Args:
        heads: matrices whose rows score the vocabulary; they are `peak` times larger, so that logits have
            clear winners, as a trained model's have.
    """

    seed: int = 0
    heads: tuple[str, ...] = ("embed", "lm_head")
    peak: float = 8.0


class WeightStore:
    """Hands out device tensors at once and fills them in `load`. Shared by a model's programs.

    Layouts: 'rows' puts matrices [N_i, K] below each other; 'pairs' takes the rows of two in turn, so that
    row 2i is the first's row i and row 2i + 1 the second's. A matrix takes the dtype asked for, whatever its
    file has; quantised ones are expanded on the host.
    """

    def __init__(self, ctx: CudaContext, raw: Mapping[str, RawWeight], dummy: Dummy | None = None) -> None:
        """`dummy`: makes those that `raw` lacks."""
        self._ctx = ctx
        self._raw = dict(raw)
        self._dummy = dummy
        self._held: dict[tuple[object, ...], DeviceTensor] = {}
        self._pieces: list[Piece] = []
        self._fills: list[tuple[DeviceTensor, str, float, float]] = []
        self._temporary: DeviceBuffer | None = None

    def vector(self, t: Tensor) -> DeviceTensor:
        """A norm's weight or a table of float32: as in the file, converted to float32."""
        return self._get((t.name,), (t,), tuple(self._sizes(t)), "f32", "rows")

    def matrix(self, tensors: tuple[Tensor, ...], dtype: str, layout: str) -> DeviceTensor:
        """Raises OpError for weights that are missing or do not fit each other."""
        shapes = [self._sizes(t) for t in tensors]
        if len({s[-1] for s in shapes}) != 1 or (layout == "pairs" and len(set(shapes)) != 1):
            raise OpError(f"weights do not fit into one ({layout})", got=", ".join(str(t) for t in tensors))
        shape = (sum(s[0] for s in shapes), shapes[0][-1])
        return self._get(tuple(t.name for t in tensors), tensors, shape, dtype, layout)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._held.values())

    def load(self, progress: Progress | None = None) -> None:
        """Fills what was handed out since the last call; returns when all is on the device.

        Works on a stream of its own, so that another thread may capture graphs meanwhile.
        """
        self._ctx.device.make_current()
        stream = Stream()
        pieces, self._pieces = self._pieces, []
        fills, self._fills = self._fills, []
        for seed, (tensor, _, mean, scale) in enumerate(fills):
            self._fill(tensor, seed, mean, scale, stream)
        upload(pieces, stream, progress)
        stream.synchronize("weights")
        self._temporary = None
        for raw in self._raw.values():
            if raw.release is not None:
                raw.release()

    def _get(
        self,
        names: tuple[str, ...],
        tensors: tuple[Tensor, ...],
        shape: tuple[int, ...],
        dtype: str,
        layout: str,
    ) -> DeviceTensor:
        key = (names, dtype, layout)
        if key not in self._held:
            held = self._held[key] = DeviceTensor.empty(shape, dtype, "weights " + " ".join(names))
            row = shape[-1] * item_bytes(dtype) if len(shape) > 1 else prod(shape) * item_bytes(dtype)
            at = held.address
            made = [t for t in tensors if t.name not in self._raw]
            if made:
                self._fills.append((held, *self._normal(made, len(tensors), shape)))
                return held
            for t in tensors:
                step = row * (len(tensors) if layout == "pairs" else 1)
                self._pieces += self._read(t, dtype, at, step)
                at += row if layout == "pairs" else prod(self._sizes(t)) * item_bytes(dtype)
        return self._held[key]

    def _sizes(self, t: Tensor) -> tuple[int, ...]:
        raw = self._raw.get(t.name)
        shape = t.sizes({})
        if raw is not None and raw.shape != shape:
            raise OpError(f"weight {t.name}", expected=shape, got=raw.shape)
        return shape

    def _normal(self, made: list[Tensor], count: int, shape: tuple[int, ...]) -> tuple[str, float, float]:
        """(name, mean, scale) of a dummy."""
        name = made[0].name
        if self._dummy is None or len(made) != count:
            raise OpError("weight is missing", expected=name, got=f"{len(self._raw)} others")
        if len(shape) == 1:
            return name, 1.0, 0.0
        return name, 0.0, shape[-1] ** -0.5 * (self._dummy.peak if name in self._dummy.heads else 1.0)

    def _fill(self, t: DeviceTensor, index: int, mean: float, scale: float, stream: Stream) -> None:
        assert self._dummy is not None
        fill_normal(self._ctx, t, self._dummy.seed * 1_000_003 + index, mean, scale, stream)

    def _read(self, t: Tensor, dtype: str, address: int, pitch: int) -> list[Piece]:
        """A weight's way to the device, in pieces of whole rows that fit a slot of the ring."""
        raw = self._raw[t.name]
        rows, k = (raw.shape[0], raw.shape[1]) if len(raw.shape) == 2 else (1, prod(raw.shape))
        source = raw.format if raw.format in PLAIN else "f32"  # as it lies in the slot
        row_bytes = k * item_bytes(source)
        if row_bytes > SLOT_BYTES:
            raise OpError(f"a row of weight {t.name} is too long", expected=SLOT_BYTES, got=row_bytes)
        each = SLOT_BYTES // row_bytes
        pieces = []
        for first in range(0, rows, each):
            count = min(each, rows - first)
            read = _reader(raw, rows, k, first, count)
            send = self._sender(source, dtype, k, count, address + first * pitch, pitch)
            pieces.append(Piece(count * row_bytes, read, send, t.name))
        return pieces

    def _sender(
        self, source: str, dtype: str, k: int, rows: int, address: int, pitch: int
    ) -> Callable[[int, Stream], None]:
        width = k * item_bytes(dtype)

        def direct(host: int, stream: Stream) -> None:
            if pitch == width:
                stream.upload(address, host, rows * width)
            else:
                stream.copy_rows(address, pitch, host, width, width, rows, host=True)

        def converted(host: int, stream: Stream) -> None:
            if self._temporary is None:  # work of one stream is in order: one buffer serves all pieces
                self._temporary = DeviceBuffer(3 * SLOT_BYTES, "weights conversion")
            raw, out = self._temporary.address, self._temporary.address + SLOT_BYTES
            stream.upload(raw, host, rows * k * item_bytes(source))
            kernel = self._ctx.library.kernel(f"convert_{source}_{dtype}")
            args = (ptr(out), ptr(raw), i64(rows * k))
            Launch(kernel, (FILL_BLOCKS, 1, 1), 256, args, label="convert")(stream)
            stream.copy_rows(address, pitch, out, width, width, rows)

        return direct if source == dtype else converted


def fill_normal(
    ctx: CudaContext,
    t: DeviceTensor,
    seed: int,
    mean: float = 0.0,
    scale: float = 1.0,
    stream: Stream | None = None,
) -> None:
    """Fills a contiguous tensor of floats with seeded normals, on the context's stream if none is given."""
    args = (ptr(t.address), i64(prod(t.shape)), i64(seed), f32(mean), f32(scale))
    kernel = ctx.library.kernel(f"fill_normal_{t.dtype}")
    Launch(kernel, (FILL_BLOCKS, 1, 1), 256, args, label="fill_normal")(stream or ctx.stream)


def _reader(raw: RawWeight, rows: int, k: int, first: int, count: int) -> Callable[[Array], None]:
    """Fills a slot with rows first … first + count; quantised ones as float32."""
    per_block, block_bytes = FORMATS[raw.format]
    row = k // per_block * block_bytes
    table = raw.data.reshape(rows, row)
    order = None if raw.row_order is None else raw.row_order[first : first + count]

    def copied(into: Array) -> None:
        if order is None:
            into.reshape(count, row)[...] = table[first : first + count]
        else:
            np.take(table, order, axis=0, out=into.reshape(count, row))

    def expanded(into: Array) -> None:
        part = table[first : first + count] if order is None else table[order]
        into.view(np.float32).reshape(count, k)[...] = dequantize(raw.format, part.reshape(-1), (count, k))

    if raw.format not in PLAIN:
        return expanded
    if order is None and raw.origin is not None:
        path, offset = raw.origin
        return read_span(path, offset + first * row)
    return copied
