"""Attention over a paged KV cache.

The reference keeps the cache as kv[N, Y, 2, G, S, D]: block, layer, key or value, KV head, token in the
block, channel. A backend may order what lies within one block of one layer as its kernels want; it converts
for tests (`to_reference`). Token t of a row is at block_table[row, t // S], offset t % S.

A cache may hold keys divided by `k_scale` and values divided by `v_scale`, which 8 bits need where they would
clip; past the largest number of the format they are stored as that number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.paged import attention_bound, attention_cases, kv_append_cases
from pegainfer.ops.float8 import to_e4m3
from pegainfer.ops.spec import INTS, In, OpSpec, Out, State, Tolerance, declare
from pegainfer.ops.stored import plain
from pegainfer.ops.tensor import CACHED

Array = np.ndarray[Any, Any]


SCALES = {"k_scale": 1.0, "v_scale": 1.0}


def _kv_append(
    kv: Array, k: Array, v: Array, slots: Array, *, layer: int, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    block_size = kv.shape[4]
    for which, (values, scale) in enumerate(((k, k_scale), (v, v_scale))):
        stored = values.astype(np.float32) * np.float32(1 / scale)  # as the kernels multiply
        stored = to_e4m3(stored) if kv.dtype == np.uint8 else stored
        kv[slots // block_size, layer, which, :, slots % block_size] = stored


def _attention(
    out: Array,
    q: Array,
    kv: Array,
    query_starts: Array,
    query_lens: Array,
    context_lens: Array,
    block_table: Array,
    *,
    layer: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    group = q.shape[1] // kv.shape[3]
    for row, context in enumerate(context_lens):
        first = query_starts[row]
        stop = first + query_lens[row]
        blocks = block_table[row, : -(-int(context) // kv.shape[4])]
        pages = plain(kv[blocks, layer]).astype(np.float64)  # [blocks, 2, G, S, D]
        keys, values = (
            np.moveaxis(pages, 2, 0).swapaxes(1, 2).reshape(kv.shape[3], 2, -1, kv.shape[5]).swapaxes(0, 1)
        )
        for t in range(first, stop):
            seen = context - (stop - 1 - t)
            for head in range(q.shape[1]):
                scores = keys[head // group, :seen] @ q[t, head].astype(np.float64) * (scale * k_scale)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights / weights.sum() @ values[head // group, :seen] * v_scale


KV_APPEND = declare(
    OpSpec(
        name="kv_append",
        doc="writes k and v of token t at place slots[t] = block · S + offset of the cache's layer",
        operands=(
            State("kv", "N Y 2 G S D", CACHED),
            In("k", "T G D"),
            In("v", "T G D"),
            In("slots", "T", INTS, into="N S"),
        ),
        attrs=("layer", *SCALES),
        defaults=SCALES,
        idle="NY",
        reference=_kv_append,
        bytes=lambda s, held: 2 * (held["k"] + held["v"]) + held["slots"],
        cases=kv_append_cases,
        tolerance={"f32": Tolerance(0.0, 0.0, "one rounding to the cache's dtype, to nearest even")},
    )
)

ATTENTION = declare(
    OpSpec(
        name="attention",
        doc="causal softmax(q · kᵀ · scale) · v of each row's tokens over its pages; heads share KV heads",
        operands=(
            Out("out", "T H D"),
            In("q", "T H D"),
            State("kv", "N Y 2 G S D", CACHED),
            In("query_starts", "R", INTS),  # row r's tokens are query_starts[r] .. + query_lens[r]
            In("query_lens", "R", INTS),
            In("context_lens", "R", INTS),  # tokens of the row in the cache, those of this step included
            In("block_table", "R W", INTS, into="N"),
        ),
        attrs=("layer", "scale", *SCALES),
        defaults=SCALES,
        idle="NYW",
        cost_axes="CQ",
        reference=_attention,
        # C: cached tokens read, summed over rows; Q: query-key pairs (both known by the host for each step)
        flops=lambda s: 4 * s.get("Q", s["T"]) * s["H"] * s["D"],
        bytes=lambda s, held: (
            held["q"] + held["out"] + held["kv"] // (s["N"] * s["Y"] * s["S"]) * s.get("C", s["T"])
        ),
        cases=attention_cases,
        tolerance={
            "f32": Tolerance(
                2.0**-23,
                0.0,
                "scores are float32 dot products of D; their absolute error is the weights' relative one",
                attention_bound,
            )
        },
        requires=(("H a multiple of G", lambda s: s["H"] % s["G"] == 0),),
    )
)
