"""Plain matrices of a checkpoint that are quantised while they are loaded (--quantization)."""

from __future__ import annotations

from collections.abc import Mapping

from pegainfer.ops.quantize import BLOCK, quantized_weight
from pegainfer.runtime.weights.fp8 import form_for
from pegainfer.runtime.weights.weight import Scheme, Weight

PLAIN = ("f32", "f16", "bf16")
ROWS_OF_FP8 = "FP8 by rows"  # one scale a row, in the widest form that divides it
# Kind -> the format of linear layers, and of the vocabulary's tables, whose errors cost most (or None).
KINDS: dict[str, tuple[str, str | None]] = {
    "int4": ("q4_1", "q8_0"),
    "int8": ("q8_0", "q8_0"),
    "fp8": (ROWS_OF_FP8, None),
}
TABLES = ("embed", "lm_head")
ROUTERS = ("w_router",)  # small, and an error there sends a token to another expert
LEAST_ROWS = 64  # matrices with fewer are gates, taps and the like


def quantized_on_load(weights: Mapping[str, Weight], kind: str) -> dict[str, Weight]:
    """The same weights, of which plain matrices are to be quantised when a backend loads them.

    Args:
        weights: by the forward's names. Vectors, routers, narrow matrices and those that are quantised in
            the file stay as they are.
        kind: a key of KINDS.
    """
    linear, table = KINDS[kind]

    def chosen(name: str, w: Weight) -> Weight:
        form = table if name in TABLES else linear
        return _quantized(w, form) if form is not None and _is_chosen(name, w) else w

    return {name: chosen(name, w) for name, w in weights.items()}


def _is_chosen(name: str, w: Weight) -> bool:
    wide = len(w.shape) > 1 and w.shape[-2] >= LEAST_ROWS and w.shape[-1] % BLOCK == 0
    return wide and w.dtype in PLAIN and name.rpartition(".")[2] not in ROUTERS


def _quantized(w: Weight, form: str) -> Weight:
    def form_of(columns: int) -> str:
        return form_for(None, columns) or "" if form == ROWS_OF_FP8 else form

    def repack(matrix: Weight) -> Weight:
        values = w.scheme.decode(matrix)
        return quantized_weight(form_of(values.shape[1]), values)

    scheme = Scheme(
        f"{w.scheme.name} quantised to {form}",
        w.scheme.parts,
        lambda m: repack(m).values(),
        form_of,
        repack,
    )
    return Weight(scheme, w.shape, w.parts, w.shard)
