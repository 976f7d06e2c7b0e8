"""The default model in another storage format, written as a GGUF file by our own quantisers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.ops.quantize import quantize
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.formats import FORMATS
from pegainfer.runtime.weights.gguf import GGUFFile, StringArray
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes

ALIGNMENT = 32


def requantised(source: Path, target: Path, form: str) -> Path:
    """Writes `source` with every matrix in the format `form`; vectors and metadata stay."""
    with GGUFFile(source) as file, target.open("wb") as out:
        table, at = [], 0
        for name, info in file.tensors.items():
            kind = form if len(info.shape) == 2 else info.format
            table.append(GGUFTensor(name, GGML[kind], info.shape, b"", at))
            at += -(-FORMATS[kind].nbytes(prod(info.shape)) // ALIGNMENT) * ALIGNMENT
        out.write(gguf_bytes(plain_metadata(file.metadata), table, alignment=ALIGNMENT))
        for name, info in file.tensors.items():
            data = file.part(name).bytes()
            if len(info.shape) == 2:
                data = quantize(form, dequantize(info.format, data, info.shape))
            out.write(data.tobytes())
            out.write(bytes(-data.nbytes % ALIGNMENT))
    return target


def plain_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A file's metadata as the writer takes it."""
    return {key: _plain(value) for key, value in metadata.items()}


def _plain(value: Any) -> Any:
    """Metadata as the writer takes it."""
    if isinstance(value, StringArray):
        return value.to_list()
    return np.array(value) if isinstance(value, memoryview) else value
