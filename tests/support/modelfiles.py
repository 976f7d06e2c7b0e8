"""Writers of small GGUF and safetensors files, right or wrong on purpose, for the tests of their readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

GGML = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q4_k": 12, "q5_k": 13,
    "q2_k": 10, "q3_k": 11, "q6_k": 14, "iq4_nl": 20, "iq4_xs": 23, "i32": 26, "bf16": 30, "mxfp4": 39,
}  # fmt: skip
_NUMPY_KINDS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6,
    "bool": 7, "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip


class Typed(NamedTuple):
    """A metadata value given as its GGUF type number and its bytes."""

    kind: int
    raw: bytes


class GGUFTensor(NamedTuple):
    """`shape` in NumPy order; `offset` None: right after the tensor before it, aligned."""

    name: str
    kind: int
    shape: tuple[int, ...]
    data: bytes
    offset: int | None = None


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """Type number and bytes of a Python value: int as u32, float as f32, lists of strings, NumPy arrays."""
    if isinstance(value, Typed):
        return struct.pack("<I", value.kind) + value.raw
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _NUMPY_KINDS[value.dtype.name], value.size) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(gguf_string(v) for v in value)


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Sequence[GGUFTensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    tensor_count: int | None = None,
    key_count: int | None = None,
) -> bytes:
    """A whole file. The counts of the header may be made to lie."""
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if key_count is None else key_count,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(gguf_string(key) + gguf_value(value) for key, value in pairs)
    data = b""
    for t in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if t.offset is None else t.offset
        head += gguf_string(t.name) + struct.pack("<I", len(t.shape))
        head += struct.pack(f"<{len(t.shape)}Q", *reversed(t.shape)) + struct.pack("<IQ", t.kind, offset)
        data += t.data
    return head + bytes(-len(head) % alignment) + data


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes, *, length: int | None = None) -> bytes:
    """A whole file from a header as given; `length` makes the header's length lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def safetensors_file(tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> bytes:
    """A correct file of name -> (dtype, shape, bytes)."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return safetensors_bytes(header, data)
