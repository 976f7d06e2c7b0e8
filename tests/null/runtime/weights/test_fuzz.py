"""Hostile headers: whatever the bytes are, a reader gives right views or ModelFileError, and stays small."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.gguf import GGUFFile, StringArray
from pegainfer.runtime.weights.safetensors import SafetensorsFile, ShardedSafetensors
from pegainfer.runtime.weights.tensorfile import TensorFile
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes, safetensors_bytes, safetensors_file

# Of Python objects while one small file is read: the file's few kilobytes cannot cost more.
MAX_PEAK_BYTES = 1 << 20
EXAMPLES = settings(max_examples=300, deadline=None)
FEW_EXAMPLES = settings(max_examples=120, deadline=None)  # JSON is slow to make
HUGE = st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1])

GGUF = gguf_bytes(
    {
        "general.architecture": "llama",
        "general.alignment": 32,
        "tokens": ["a", "bc", "", "é"],
        "scores": np.array([1.0, 2.0], np.float32),
        "flag": True,
    },
    [
        GGUFTensor("q", GGML["q4_1"], (2, 32), bytes(40)),
        GGUFTensor("w", GGML["f32"], (2, 3), bytes(24)),
        GGUFTensor("k", GGML["q6_k"], (1, 256), bytes(210)),
    ],
)
SAFETENSORS = safetensors_file({"a": ("F32", [2, 3], bytes(24)), "b": ("BF16", [4], bytes(8))})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def use(file: TensorFile) -> None:
    """Reads everything that the reader offers."""
    if isinstance(file, GGUFFile):
        for value in file.metadata.values():
            if isinstance(value, memoryview):
                assert len(value.tolist()) == len(value)
            elif isinstance(value, StringArray):
                assert len(list(value)) == len(value)
    for name, info in file.tensors.items():
        raw = file.part(name).bytes()
        assert raw.nbytes == info.nbytes == len(raw.tobytes())
        try:
            values = dequantize(info.format, raw, info.shape)
        except UnsupportedError:
            continue
        assert values.shape == info.shape


def survives(opener: Callable[[Path], TensorFile], path: Path, data: bytes) -> None:
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with opener(path) as file:
            use(file)
    except ModelFileError as e:
        assert str(path.parent) in str(e) and len(str(e)) < 2000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """A valid file with a few bytes overwritten, inserted or cut, and huge numbers put in."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "number", "word", "insert", "cut", "end"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "number":
                data[at : at + 8] = struct.pack("<Q", draw(HUGE))
            case "word":
                data[at : at + 4] = struct.pack("<I", draw(st.integers(0, 2**32 - 1)))
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "cut":
                del data[at : at + draw(st.integers(1, 16))]
            case "end":
                del data[at:]
    return bytes(data)


@EXAMPLES
@given(data=mutated(GGUF))
def test_mutated_gguf(folder: Path, data: bytes) -> None:
    survives(GGUFFile, folder / "m.gguf", data)


@EXAMPLES
@given(data=st.binary(max_size=400).map(lambda b: b"GGUF\x03\0\0\0" + b) | st.binary(max_size=64))
def test_random_gguf(folder: Path, data: bytes) -> None:
    survives(GGUFFile, folder / "r.gguf", data)


@EXAMPLES
@given(
    tensors=HUGE,
    keys=HUGE,
    kind=st.integers(0, 13),
    element=st.integers(0, 13),
    count=HUGE,
    tail=st.binary(max_size=64),
)
def test_gguf_with_lying_counts(
    folder: Path, tensors: int, keys: int, kind: int, element: int, count: int, tail: bytes
) -> None:
    pair = struct.pack("<QcIIQ", 1, b"k", kind, element, count)
    data = b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + pair + tail + bytes(256)
    survives(GGUFFile, folder / "c.gguf", data)


@EXAMPLES
@given(
    shape=st.lists(st.integers(0, 2**64 - 1) | st.integers(1, 64), max_size=5),
    kind=st.integers(0, 45) | HUGE.map(lambda n: n & 0xFFFFFFFF),
    offset=HUGE | st.integers(0, 256),
)
def test_gguf_with_lying_tensors(folder: Path, shape: list[int], kind: int, offset: int) -> None:
    tensors = [
        GGUFTensor("w", 0, (8,), bytes(32)),
        GGUFTensor("t", kind, tuple(shape), bytes(300), offset),
    ]
    survives(GGUFFile, folder / "t.gguf", gguf_bytes({}, tensors))


@EXAMPLES
@given(data=mutated(SAFETENSORS))
def test_mutated_safetensors(folder: Path, data: bytes) -> None:
    survives(SafetensorsFile, folder / "m.safetensors", data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "I8", "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 8) | HUGE, max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 64) | HUGE, min_size=2, max_size=2) | JSON,
    }
)


@FEW_EXAMPLES
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]) | st.text(max_size=4), ENTRY | JSON),
    length=st.none() | HUGE,
    size=st.integers(0, 64),
)
def test_lying_safetensors(folder: Path, header: dict[str, Any], length: int | None, size: int) -> None:
    survives(SafetensorsFile, folder / "l.safetensors", safetensors_bytes(header, bytes(size), length=length))


@FEW_EXAMPLES
@given(
    index=st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=6), JSON | st.text())}) | JSON
)
def test_lying_index(folder: Path, index: Any) -> None:
    (folder / "a.safetensors").write_bytes(SAFETENSORS)
    survives(ShardedSafetensors, folder / "model.safetensors.index.json", json.dumps(index).encode())
