"""Weights on their way to the device, over a driver whose memory is the host's: each byte at its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.kernels.cuda.store import WeightStore
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.cuda.tensor import to_bf16
from pegainfer.runtime.weights.raw import RawWeight
from pegainfer.runtime.weights.safetensors import SafetensorsFile
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels
from tests.support.modelfiles import safetensors_bytes

ROWS, WIDTH = 5000, 1024  # more than one piece
SHAPE = (ROWS, WIDTH)


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaContext]:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.kernels.cuda.context.CublasLt", FakeLt)
    with fake_cuda():
        yield CudaContext()


def test_matrices_come_from_the_file_itself_not_its_mapping(ctx: CudaContext, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(SHAPE).astype(np.float32) for name in ("a", "b")}
    data = [to_bf16(v).tobytes() for v in values.values()]
    header = {
        name: {
            "dtype": "BF16",
            "shape": list(SHAPE),
            "data_offsets": [i * len(data[0]), (i + 1) * len(data[0])],
        }
        for i, name in enumerate(values)
    }
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(header, b"".join(data)))
    with SafetensorsFile(path) as file:
        # What the mapping would give is wrong on purpose.
        raw = {
            name: RawWeight("bf16", SHAPE, np.zeros(len(data[0]), np.uint8), origin=file.origin(name))
            for name in values
        }
        store = WeightStore(ctx, raw)
        a, b = (Tensor(name, SHAPE, "bf16", Kind.WEIGHT) for name in values)
        rows, pairs = store.matrix((a, b), "bf16", "rows"), store.matrix((a, b), "bf16", "pairs")
        store.load()
        want = {name: to_bf16(v).view(np.uint16) for name, v in values.items()}
        assert np.array_equal(
            to_bf16(rows.numpy(ctx.stream)).view(np.uint16), np.concatenate(list(want.values()))
        )
        got = to_bf16(pairs.numpy(ctx.stream)).view(np.uint16)
        assert np.array_equal(got[0::2], want["a"]) and np.array_equal(got[1::2], want["b"])
