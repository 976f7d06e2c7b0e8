"""Hostile inputs and error bounds of the coarse ops of latent attention: those of their parts, carried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pegainfer.ops.cases.common import Flavour, i32, mixed_rows, normal, outliers, tiny, weights, zeros
from pegainfer.ops.cases.fused import norm_error, norm_gain, product_error
from pegainfer.ops.cases.linear import Dot, dot_f32
from pegainfer.ops.cases.mla import (
    BATCHES,
    POSITIONS,
    attended,
    batch_inputs,
    head_products_error,
    in_cache,
    rotation_error,
    row_error,
    stack,
)
from pegainfer.ops.cases.pointwise import rotation_positions, rotation_table
from pegainfer.ops.spec import Arrays, Case

Array = np.ndarray[Any, Any]
KEPT = 16  # channels of a query head that are not rotated, of values
BLOCK_SIZE, LAYERS = 16, 2


def mla_qkv_cases(rng: np.random.Generator) -> list[Case]:
    """Queries straight from the stream and through a narrow product; slots in no order; DeepSeek's sizes."""
    # T, M, H, kept, rotated, rank, narrow (0: none)
    shapes: tuple[tuple[int, int, int, int, int, int, int, Flavour], ...] = (
        (1, 64, 4, 16, 8, 32, 0, normal),
        (5, 64, 4, 16, 8, 32, 32, normal),
        (3, 96, 2, 128, 64, 512, 0, normal),
        (2, 128, 3, 128, 64, 512, 64, outliers),
        (40, 32, 1, 8, 2, 48, 0, mixed_rows),
        (17, 256, 2, 24, 8, 16, 256, normal),
        (4, 64, 2, 16, 8, 32, 0, zeros),
        (4, 33, 2, 16, 8, 32, 0, tiny),
    )
    return [_qkv_case(rng, *shape) for shape in shapes]


def _qkv_case(
    rng: np.random.Generator, t: int, m: int, h: int, kept: int, rotated: int, rank: int, narrow: int,
    flavour: Flavour,
) -> Case:  # fmt: skip
    head, width, blocks = kept + rotated, rank + rotated, -(-t // BLOCK_SIZE) + 1
    sizes = {"T": t, "M": m, "H": h, "F": head, "A": h * head, "X": narrow or m, "D": width, "K": rank}
    sizes |= {"B": rotated, "P": POSITIONS, "N": blocks, "Y": LAYERS, "S": BLOCK_SIZE}
    arrays = {
        "kv": np.full((blocks, LAYERS, BLOCK_SIZE, width), np.nan, np.float32),
        "x": flavour(rng, (t, m)),
        "norm": norm_gain(rng, m),
        "wq": weights(rng, h * head, narrow or m),
        "w_latent": weights(rng, width, m),
        "latent_norm": norm_gain(rng, rank),
        "positions": i32(rotation_positions(rng, t, POSITIONS)),
        "slots": i32(rng.permutation(blocks * BLOCK_SIZE)[:t]),
        "cos_sin": rotation_table(POSITIONS, rotated, 1e4),
    }
    if narrow:
        arrays |= {"wq_down": weights(rng, narrow, m), "q_norm": norm_gain(rng, narrow)}
    through = f" through {narrow}" if narrow else ""
    label = f"{t}x{m}{through}, {h} heads of {kept} and {rotated}, rank {rank}, {flavour.__name__}"
    attrs = {"eps": 1e-5, "latent_eps": 1e-6, "layer": int(rng.integers(LAYERS))}
    return Case(label, sizes, attrs, arrays)


def mla_qkv_bound(dot: Dot) -> Callable[[Case], Arrays]:
    """Norm, one or two products, rotation; the latent's norm."""

    def bound(case: Case) -> Arrays:
        a, s, eps = case.arrays, case.sizes, case.attrs["latent_eps"]
        h, h_error = norm_error(a["x"], a["norm"], case.attrs["eps"])
        latent, latent_error = product_error(h, h_error, a["w_latent"], dot)
        if "wq_down" in a:
            down, down_error = product_error(h, h_error, a["wq_down"], dot)
            h, h_error = norm_error(down, a["q_norm"], eps, down_error)
        q, error = (part.reshape(s["T"], s["H"], s["F"]) for part in product_error(h, h_error, a["wq"], dot))
        kept = s["F"] - s["B"]
        turned = rotation_error(q[..., kept:], error[..., kept:])
        rows = row_error(latent, a["latent_norm"], eps, latent_error)
        return {"q": np.concatenate([error[..., :kept], turned], axis=-1), "kv": in_cache(case, rows)}

    return bound


def mla_attention_cases(rng: np.random.Generator) -> list[Case]:
    """Those of latent_attention, with queries of KEPT and values of KEPT + 8 channels before and after it."""
    cases = []
    for b in BATCHES:
        sizes, arrays, layer = batch_inputs(rng, b)
        kept, values = (128, 128) if b.rank == 512 else (KEPT, KEPT + 8)
        sizes |= {"K": b.rank, "X": kept, "F": kept + b.rotated, "A": values}
        arrays |= {
            "q": b.q(rng, (sizes["T"], b.heads, kept + b.rotated)) * np.float32(b.q_size),
            # No row of it is large: scores would be, and one key would take all.
            "w_k": normal(rng, (b.heads, b.rank, kept)) * np.float32(kept**-0.5),
            "w_v": stack(rng, b.heads, values, b.rank),
        }
        cases.append(Case(b.label, sizes, {"layer": layer, "scale": sizes["F"] ** -0.5}, arrays))
    return cases


def mla_attention_bound(case: Case) -> Arrays:
    """The absorbed query's error moves the scores; the attended latent's goes through the value matrix."""
    a, s = case.arrays, case.sizes
    q, w_k, w_v = a["q"], a["w_k"].astype(np.float64), a["w_v"].astype(np.float64)
    plain = q[..., : s["X"]].astype(np.float64)
    absorbed = np.concatenate([np.einsum("thx,hkx->thk", plain, w_k), q[..., s["X"] :]], axis=-1)
    error = np.zeros(absorbed.shape)
    error[..., : s["K"]] = head_products_error(q[..., : s["X"]], a["w_k"], dot_f32)
    latent, moved, rounded = attended(case, absorbed, error, s["K"], w_v)
    carried = np.einsum("thk,hak->tha", rounded, np.abs(w_v))
    return {"out": moved + carried + head_products_error(latent, a["w_v"], dot_f32)}
