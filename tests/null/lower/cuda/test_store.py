"""Weights on their way to the device, over a driver whose memory is the host's: each byte at its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pegainfer.contract.errors import OpError
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.store import Dummy, WeightStore
from pegainfer.ops.quantize import quantize, quantized_weight
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.bf16 import from_bf16
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.weights.safetensors import SafetensorsFile
from pegainfer.runtime.weights.weight import VALUES, Weight, float32, plain
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels
from tests.support.modelfiles import safetensors_file
from tests.support.schemes import fp8_blocks, seeded

F32 = npt.NDArray[np.float32]
ROWS, WIDTH = 5000, 1024  # more than one piece
SHAPE = (ROWS, WIDTH)


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaContext]:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    with fake_cuda():
        yield CudaContext()


def normals(*shape: int) -> F32:
    """Values that bf16 holds exactly."""
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return from_bf16(quantize("bf16", values).view(np.uint16)).reshape(shape)


def tensor(name: str, shape: tuple[int, ...], dtype: str = "bf16") -> Tensor:
    return Tensor(name, shape, dtype, Kind.WEIGHT)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SafetensorsFile]:
    path = tmp_path / "m.safetensors"
    data = {name: values.tobytes() for name, values in stored().items()}
    path.write_bytes(safetensors_file({name: ("BF16", SHAPE, raw) for name, raw in data.items()}))
    with SafetensorsFile(path) as opened:
        yield opened


def stored() -> dict[str, npt.NDArray[np.uint8]]:
    return dict(zip("ab", np.split(quantize("bf16", normals(2, *SHAPE)), 2), strict=True))


def weights_of(file: SafetensorsFile) -> dict[str, Weight]:
    return {name: Weight(plain("bf16"), SHAPE, {VALUES: file.part(name)}) for name in file.tensors}


def test_matrices_are_read_from_the_file_and_not_mapped(
    ctx: CudaContext, file: SafetensorsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SafetensorsFile, "view", lambda _: pytest.fail("mapped pages count as memory"))
    store = WeightStore(ctx, weights_of(file))
    pair = tensor("a", SHAPE), tensor("b", SHAPE)
    rows, pairs = store.matrix(pair, "bf16", "rows"), store.matrix(pair, "bf16", "pairs")
    store.load()
    a, b = normals(2, *SHAPE)
    assert np.array_equal(rows.numpy(ctx.stream), np.concatenate([a, b]))
    got = pairs.numpy(ctx.stream)
    assert np.array_equal(got[0::2], a) and np.array_equal(got[1::2], b)


def test_a_layout_asked_for_after_loading_is_filled(ctx: CudaContext, file: SafetensorsFile) -> None:
    store = WeightStore(ctx, weights_of(file))
    pair = tensor("a", SHAPE), tensor("b", SHAPE)
    store.matrix(pair, "bf16", "rows")
    store.load()
    got = store.matrix(pair, "bf16", "pairs").numpy(ctx.stream)
    assert np.array_equal(got[1::2], normals(2, *SHAPE)[1])


def test_a_layout_asked_for_when_the_file_is_closed_is_refused(
    ctx: CudaContext, file: SafetensorsFile
) -> None:
    store = WeightStore(ctx, weights_of(file))
    store.matrix((tensor("a", SHAPE),), "bf16", "rows")
    store.load()
    file.close()
    for _ in range(2):  # it is not handed out unfilled the second time either
        with pytest.raises(OpError, match="rows of b in bf16 is not loaded; got weights file was closed"):
            store.matrix((tensor("b", SHAPE),), "bf16", "rows")


def test_a_stack_of_experts_and_the_rows_of_two_in_turn(ctx: CudaContext) -> None:
    gate, up = normals(2, 3, 5, 32)
    store = WeightStore(ctx, {n: quantized_weight("bf16", v) for n, v in (("gate", gate), ("up", up))})
    tensors = tensor("gate", gate.shape), tensor("up", up.shape)
    alone, pairs = store.matrix(tensors[:1], "bf16", "rows"), store.matrix(tensors, "bf16", "pairs")
    with pytest.raises(OpError, match=r"do not fit into one \(rows\)"):
        store.matrix(tensors, "bf16", "rows")
    store.load()
    assert np.array_equal(alone.numpy(ctx.stream), gate)
    got = pairs.numpy(ctx.stream)
    assert got.shape == (3, 10, 32)
    assert np.array_equal(got[:, 0::2], gate) and np.array_equal(got[:, 1::2], up)


def test_a_weight_of_several_parts_is_expanded(ctx: CudaContext) -> None:
    """Pieces of a slot begin inside of the tiles that a scale covers."""
    weight = seeded(fp8_blocks(128, 128), (1000, 4096), seed=0)
    store = WeightStore(ctx, {"w": weight})
    held = store.matrix((tensor("w", weight.shape),), "f32", "rows")
    store.load()
    assert np.array_equal(held.numpy(ctx.stream), weight.values())


def test_vectors_are_float32(ctx: CudaContext) -> None:
    values = normals(40)
    store = WeightStore(ctx, {"a": quantized_weight("f32", values), "b": float32(-values)})
    a, b = (store.vector(tensor(name, (40,), "f32")) for name in "ab")
    store.load()
    assert np.array_equal(a.numpy(ctx.stream), values) and np.array_equal(b.numpy(ctx.stream), -values)


def test_dummy_values_depend_on_the_name_alone(ctx: CudaContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that ask for other layouts of a weight compute with the same model."""

    def fill(ctx: CudaContext, t: DeviceTensor, seed: int, *args: object) -> None:
        made = np.random.default_rng(seed).standard_normal(t.shape).astype(np.float32)
        ctx.stream.upload(t.address, made.ctypes.data, made.nbytes)

    monkeypatch.setattr("pegainfer.lower.cuda.store.fill_normal", fill)
    store = WeightStore(ctx, {"b": Weight(plain("bf16"), (6, 8), {})}, Dummy())
    a, b = tensor("a", (6, 8)), tensor("b", (6, 8))
    rows, pairs = store.matrix((a, b), "f32", "rows"), store.matrix((a, b), "f32", "pairs")
    store.load()
    late = store.matrix((b,), "f32", "rows").numpy(ctx.stream)
    first, second = np.split(rows.numpy(ctx.stream), 2)
    assert np.array_equal(pairs.numpy(ctx.stream)[0::2], first) and not np.array_equal(first, second)
    assert np.array_equal(pairs.numpy(ctx.stream)[1::2], second) and np.array_equal(late, second)
