"""Plain matrices of a checkpoint that are quantised while they are loaded (--quantization)."""

from __future__ import annotations

from collections.abc import Mapping

from pegainfer.ops.quantize import BLOCK, quantized_weight
from pegainfer.runtime.weights.weight import Scheme, Weight

PLAIN = ("f32", "f16", "bf16")
# Kind -> the format of linear layers, and of the vocabulary's tables, whose errors cost most.
KINDS: dict[str, tuple[str, str]] = {"int4": ("q4_1", "q8_0"), "int8": ("q8_0", "q8_0")}
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
    return {
        name: _quantized(w, table if name in TABLES else linear) if _is_chosen(name, w) else w
        for name, w in weights.items()
    }


def _is_chosen(name: str, w: Weight) -> bool:
    wide = len(w.shape) > 1 and w.shape[-2] >= LEAST_ROWS and w.shape[-1] % BLOCK == 0
    return wide and w.dtype in PLAIN and name.rpartition(".")[2] not in ROUTERS


def _quantized(w: Weight, form: str) -> Weight:
    def repack(matrix: Weight) -> Weight:
        return quantized_weight(form, w.scheme.decode(matrix))

    scheme = Scheme(
        f"{w.scheme.name} quantised to {form}",
        w.scheme.parts,
        lambda m: repack(m).values(),
        lambda _: form,
        repack,
    )
    return Weight(scheme, w.shape, w.parts, w.shard)
