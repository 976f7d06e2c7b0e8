"""Storage schemes of FP8 checkpoints: a scale for the whole matrix, for each row, or for each tile.

Sources: DeepSeek-V3's config and conversion script, transformers 4.57 (fp8, fbgemm_fp8) and
compressed-tensors 0.20 (float-quantized).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from pegainfer.runtime.weights.fp8 import E4M3, F32, Bytes, form_for, pack_fp8
from pegainfer.runtime.weights.weight import Scheme, StoredPart, Weight, in_memory

SCALES = ("f32", "bf16", "f16", "f8_e8m0")


@cache
def fp8_scheme(rows: int | None, columns: int | None, suffix: str = ".weight_scale") -> Scheme:
    """E4M3 values, each times the scale of its tile.

    Args:
        rows, columns: of a tile; None: all of the matrix.
        suffix: of the scales' tensor. `.weight_scale_inv`, too, is a factor.
    """
    axes = ("N" if rows == 1 else f"N/{rows}") if rows else ""
    axes += f" K/{columns}" if columns else ""

    def read(w: Weight) -> tuple[Bytes, F32]:
        """Codes [N, K], and scales [N, tiles of a row]."""
        arrays, n = w.arrays(), w.shape[0]
        scales = arrays["scales"]
        if w.parts["scales"].format == "f8_e8m0":
            scales = np.exp2(scales.astype(np.float32) - 127)
        scales = scales.astype(np.float32).reshape(-(-n // rows) if rows else 1, -1)
        scales = scales.repeat(rows or n, 0)[:n]
        return arrays["values"].view(np.uint8).reshape(w.shape), scales

    def decode(w: Weight) -> F32:
        codes, scales = read(w)
        values: F32 = E4M3[codes]
        values *= scales.repeat(columns or w.shape[1], 1)[:, : w.shape[1]]
        return values

    def form(k: int) -> str:
        return form_for(columns, k) or "f16"

    def repack(w: Weight) -> Weight:
        name, k = form(w.shape[1]), w.shape[1]
        if name == "f16":
            return in_memory(name, w.shape, decode(w).astype("<f2").view(np.uint8))
        group = int(name.removeprefix("fp8_")[1:])
        codes, scales = read(w)
        return in_memory(
            name, w.shape, pack_fp8(group, codes, scales.repeat((columns or k) // group, 1)[:, : k // group])
        )

    parts = (
        StoredPart("values", ".weight", "N K", ("f8_e4m3",)),
        StoredPart("scales", suffix, axes, SCALES),
    )
    name = f"fp8_{rows}x{columns}" if columns else "fp8_row" if rows else "fp8_tensor"
    return Scheme(name, parts, decode, form, repack)
