"""The weights of a model on the GPU, in the layouts that the kernels read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from threading import Lock
from zlib import crc32

from pegainfer.contract.errors import ModelFileError, OpError
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.fp8_store import Fp8Loader, Fp8Target, allocate_fp8, fp8_targets
from pegainfer.lower.cuda.packing import PackedTarget, make_up, packed_items
from pegainfer.lower.cuda.plain_store import FILL_BLOCKS, Conversion, Target, work_items
from pegainfer.ops.tensor import Tensor
from pegainfer.runtime.cuda.launch import Launch, f32, i64, ptr
from pegainfer.runtime.cuda.packed import PackedForm
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor, item_bytes
from pegainfer.runtime.cuda.upload import Progress, WorkItem, upload
from pegainfer.runtime.weights.made_up import HEADS, PEAK
from pegainfer.runtime.weights.weight import Weight


@dataclass(frozen=True)
class Dummy:
    """Weights that are generated on the device instead of read: seeded normals that keep activations of order
    one.

    Args:
        heads: matrices that are `peak` times larger, see runtime/weights/made_up.py.
    """

    seed: int = 0
    heads: tuple[str, ...] = HEADS
    peak: float = PEAK


AnyTarget = Target | Fp8Target | PackedTarget


class WeightStore:
    """Hands out device tensors at once and fills them in `load`. Shared by a model's programs.

    Layouts: 'rows' puts matrices [N_i, K] below each other; 'pairs' takes the rows of two in turn, so that
    row 2i is the first's row i and row 2i + 1 the second's, in each matrix of a stack. A matrix takes the
    dtype asked for, whatever its file has; quantised ones are expanded on the host, or packed on the device.

    A tensor that is first asked for once `load` has begun is filled before it is handed out.
    """

    def __init__(self, ctx: CudaContext, weights: Mapping[str, Weight], dummy: Dummy | None = None) -> None:
        """`dummy`: makes those that `weights` lacks or has without parts."""
        self._ctx = ctx
        self._weights = dict(weights)
        self._dummy = dummy
        self._held: dict[tuple[object, ...], DeviceTensor] = {}
        self._waiting: list[AnyTarget] = []
        self._begun = False
        self._lock = Lock()  # `load` may run beside a thread that asks for more

    def vector(self, t: Tensor) -> DeviceTensor:
        """A norm's weight or a table of float32: as in the file, converted to float32."""
        return self._get((t,), self._sizes(t), "f32", "rows")

    def matrix(self, tensors: tuple[Tensor, ...], dtype: str, layout: str) -> DeviceTensor:
        """Matrices as one, or a stack [E, N, K] of each as one stack.

        Raises OpError for weights that are missing, do not fit each other, or are asked for when their files
        are closed.
        """
        first, *others = self._fitting(tensors, layout)
        rows = first[-2] + sum(other[-2] for other in others)
        return self._get(tensors, (*first[:-2], rows, first[-1]), dtype, layout)

    def fp8(self, tensors: tuple[Tensor, ...], layout: str) -> tuple[DeviceTensor, DeviceTensor]:
        """Matrices in an FP8 form as one: codes [N, K], and scales [N] or [K / 128, N] float32.

        Raises OpError as `matrix` does.
        """
        names, shapes = [t.name for t in tensors], self._fitting(tensors, layout)
        keys = [(tuple(names), part, layout) for part in ("codes", "scales")]
        if keys[0] in self._held:
            return self._held[keys[0]], self._held[keys[1]]
        self._check_stored(names)
        parts = allocate_fp8(names, shapes, tensors[0].dtype)
        self._fill_or_wait(
            fp8_targets(names, shapes, *parts, layout), f"{layout} of {' '.join(names)} in FP8"
        )
        self._held |= zip(keys, parts, strict=True)
        return parts

    def packed(self, tensors: tuple[Tensor, ...], form: PackedForm, layout: str) -> DeviceTensor:
        """Quantised matrices as one in a packed form. Raises OpError as `matrix` does."""
        names = tuple(t.name for t in tensors)
        key = (names, form.name, layout)
        if key in self._held:
            return self._held[key]
        self._check_stored(names)
        shapes = self._fitting(tensors, layout)
        # A tile of pairs has eight rows of each.
        rows = 2 * (-(-shapes[0][0] // 8) * 8) if layout == "pairs" else sum(shape[0] for shape in shapes)
        nbytes = form.nbytes(rows, shapes[0][1])
        held = DeviceTensor.empty((nbytes,), "u8", "weights " + " ".join(names))
        self._ctx.stream.fill(held.address, 0, nbytes)  # rows and columns that fill up a tile
        self._ctx.stream.synchronize("weights")
        targets, first = list[AnyTarget](), 0
        for i, (t, shape) in enumerate(zip(tensors, shapes, strict=True)):
            begins = i if layout == "pairs" else first
            targets.append(PackedTarget(t.name, shape, form, held.address, begins, layout == "pairs"))
            first += shape[0]
        self._fill_or_wait(targets, f"{layout} of {' '.join(names)} in {form.name}")
        self._held[key] = held
        return held

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._held.values())

    def load(self, progress: Progress | None = None) -> None:
        """Fills what was handed out so far; returns when all is on the device.

        Works on a stream of its own, so that another thread may capture graphs meanwhile.
        """
        with self._lock:
            targets, self._waiting, self._begun = self._waiting, [], True
        self._fill(targets, progress)

    def _get(
        self, tensors: tuple[Tensor, ...], shape: tuple[int, ...], dtype: str, layout: str
    ) -> DeviceTensor:
        names = tuple(t.name for t in tensors)
        key = (names, dtype, layout)
        if key in self._held:
            return self._held[key]
        self._check_stored(names)
        held = DeviceTensor.empty(shape, dtype, "weights " + " ".join(names))
        targets, at, width = list[AnyTarget](), held.address, shape[-1] * item_bytes(dtype)
        for t in tensors:
            pitch = width * (len(tensors) if layout == "pairs" else 1)
            target = Target(t.name, self._sizes(t), dtype, at, pitch)
            targets.append(target)
            at += width if layout == "pairs" else target.rows * width
        self._fill_or_wait(targets, f"{layout} of {' '.join(names)} in {dtype}")
        self._held[key] = held
        return held

    def _check_stored(self, names: Sequence[str]) -> None:
        for name in names:
            if self._dummy is None and not self._is_stored(name):
                raise OpError("weight is missing", expected=name, got=f"{len(self._weights)} others")

    def _fill_or_wait(self, targets: Sequence[AnyTarget], what: str) -> None:
        """`load` fills the targets; once it has begun they are filled now."""
        with self._lock:
            late = self._begun
            if not late:
                self._waiting += targets
        if not late:
            return
        try:
            self._fill(targets)
        except ModelFileError as e:
            raise OpError(
                f"layout {what} is not loaded",
                got=str(e),
                remedy="prepare every program while the weights' files are open",
            ) from e

    def _is_stored(self, name: str) -> bool:
        return name in self._weights and bool(self._weights[name].parts)

    def _sizes(self, t: Tensor) -> tuple[int, ...]:
        weight = self._weights.get(t.name)
        shape = t.sizes({})
        if weight is not None and weight.shape != shape:
            raise OpError(f"weight {t.name}", expected=shape, got=weight.shape)
        return shape

    def _fitting(self, tensors: tuple[Tensor, ...], layout: str) -> list[tuple[int, ...]]:
        """Shapes of matrices that become one. Raises OpError where they do not fit each other."""
        shapes = [self._sizes(t) for t in tensors]
        first = shapes[0]
        same = all(shape == first for shape in shapes)
        fits = all(len(shape) == 2 and shape[-1] == first[-1] for shape in shapes)
        if len(shapes) > 1 and not (same if layout == "pairs" else fits):
            raise OpError(f"weights do not fit into one ({layout})", got=", ".join(str(t) for t in tensors))
        return shapes

    def _fill(self, targets: Sequence[AnyTarget], progress: Progress | None = None) -> None:
        """Raises ModelFileError where a file cannot be read."""
        self._ctx.device.make_current()
        stream, convert, loader = Stream(), Conversion(self._ctx), Fp8Loader(self._ctx)
        items: list[WorkItem] = []
        for target in targets:
            stored = self._is_stored(target.name)
            if isinstance(target, Fp8Target):
                if stored:
                    items += loader.work_items(self._weights[target.name], target)
                else:
                    loader.make(target, partial(self._generate, target.name), stream)
            elif isinstance(target, PackedTarget):
                if stored:
                    items += packed_items(self._weights[target.name], target, self._ctx, convert.buffer)
                else:
                    seed, peak = self._made_up(target.name)
                    make_up(self._ctx, target, seed, peak, stream)
            elif stored:
                items += work_items(self._weights[target.name], target, convert)
            else:
                self._make(target, stream)
        upload(items, stream, progress)
        stream.synchronize("weights")

    def _made_up(self, name: str) -> tuple[int, float]:
        """The seed of a weight's values, and their size."""
        assert self._dummy is not None
        seed = self._dummy.seed * 1_000_003 + crc32(name.encode())
        return seed, self._dummy.peak if name in self._dummy.heads else 1.0

    def _generate(self, name: str, made: DeviceTensor, stream: Stream) -> None:
        """Seeded normals, which depend on the weight's name alone: each layout holds the same values."""
        seed, peak = self._made_up(name)
        is_vector = len(made.shape) == 1
        mean, scale = (1.0, 0.0) if is_vector else (0.0, made.shape[-1] ** -0.5 * peak)
        fill_normal(self._ctx, made, seed, mean, scale, stream)

    def _make(self, target: Target, stream: Stream) -> None:
        if target.pitch == target.width:
            made = DeviceTensor.at(target.address, target.shape, target.dtype)
            self._generate(target.name, made, stream)
            return
        made = DeviceTensor.empty(target.shape, target.dtype, f"dummy {target.name}")
        self._generate(target.name, made, stream)
        stream.copy_rows(target.address, target.pitch, made.address, target.width, target.width, target.rows)
        stream.synchronize("weights")  # the memory of `made` is freed on return


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
