"""Ops of recurrent linear-attention layers: causal convolution and the gated delta rule (arXiv:2412.06464).

Both keep a state for each sequence in a pool, one part a kind of state:

- conv[N, Y, X, F]: the last X = W - 1 inputs of the convolution, oldest first;
- delta[N, Y, H, K, V]: each value head's matrix from key channels to value channels, float32 or bf16. Within
  a call a row's matrix is float32: it is rounded where it is stored, at the row's end and where it is saved.

Row r reads and writes entry state_ids[r] of the pool in place. It starts from zeros where its first token is
at position 0 (context_lens == query_lens), whatever the entry holds. A row of id -1 (padding) has no state:
nothing is read or written and its tokens give zeros. For each token t with state_saves[t] ≥ 0 the state after
that token is also written to entry state_saves[t]. A call names no entry twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.recurrent import conv_bound, conv_cases, delta_bound, delta_cases
from pegainfer.ops.fill import constant
from pegainfer.ops.recurrence import key_heads, log_decay, sigmoid, split_heads, unit_keys
from pegainfer.ops.spec import INTS, In, OpSpec, Out, State, Tolerance, declare
from pegainfer.ops.stored import held_like, plain

Array = np.ndarray[Any, Any]

STATES = ("f32", "bf16")  # what the matrices of the delta rule may be stored as
# Of the step's rows, in the order in which kernels take them.
ROWS = (
    In("state_ids", "R", INTS, into="N"),
    In("state_saves", "T", INTS, into="N", fill=constant(-1)),
    In("query_starts", "R", INTS),  # row r's tokens are query_starts[r] .. + query_lens[r]
    In("query_lens", "R", INTS),
    In("context_lens", "R", INTS),  # tokens of the row up to and with this step's
)


def _causal_conv_silu(
    out: Array,
    conv: Array,
    x: Array,
    taps: Array,
    state_ids: Array,
    state_saves: Array,
    query_starts: Array,
    query_lens: Array,
    context_lens: Array,
    *,
    layer: int,
) -> None:
    for row, state in enumerate(state_ids):
        first, count = query_starts[row], query_lens[row]
        if state < 0 or count == 0:
            out[first : first + count] = 0
            continue
        before = np.zeros_like(conv[state, layer]) if context_lens[row] == count else conv[state, layer]
        inputs = np.concatenate([before, x[first : first + count]])
        for i in range(count):
            y = np.einsum("wf,wf->f", taps.astype(np.float64), inputs[i : i + len(taps)].astype(np.float64))
            out[first + i] = y * np.exp(-np.logaddexp(0.0, -y))
            if state_saves[first + i] >= 0:
                conv[state_saves[first + i], layer] = inputs[i + 1 : i + len(taps)]
        conv[state, layer] = inputs[count:]


def _gated_delta_rule(
    out: Array,
    delta: Array,
    qkv: Array,
    a: Array,
    b: Array,
    a_log: Array,
    dt_bias: Array,
    state_ids: Array,
    state_saves: Array,
    query_starts: Array,
    query_lens: Array,
    context_lens: Array,
    *,
    layer: int,
    eps: float,
    tiled: int,
) -> None:
    heads, key_dim, value_dim = delta.shape[2:]
    q, k, v = split_heads(qkv, heads, key_dim, value_dim)
    q, k = unit_keys(q, eps, heads, tiled) * key_dim**-0.5, unit_keys(k, eps, heads, tiled)
    decay, beta = np.exp(log_decay(a, a_log, dt_bias)), sigmoid(b.astype(np.float64))
    for row, state in enumerate(state_ids):
        first, count = query_starts[row], query_lens[row]
        if state < 0 or count == 0:
            out[first : first + count] = 0
            continue
        s = (
            np.zeros(delta.shape[2:])
            if context_lens[row] == count
            else plain(delta[state, layer]).astype(np.float64)
        )
        for t in range(first, first + count):
            s = s * decay[t][:, None, None]
            d = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", s, k[t]))
            s = s + k[t][:, :, None] * d[:, None]
            out[t] = np.einsum("hkv,hk->hv", s, q[t])
            if state_saves[t] >= 0:
                delta[state_saves[t], layer] = held_like(s, delta)
        delta[state, layer] = held_like(s, delta)


CAUSAL_CONV_SILU = declare(
    OpSpec(
        name="causal_conv_silu",
        doc="out[t] = silu(Σ taps[w] · x[t - W + 1 + w]) by channel; the last W - 1 inputs of a row are kept",
        operands=(
            Out("out", "T F"),
            State("conv", "N Y X F"),
            In("x", "T F"),
            In("taps", "W F"),
            *ROWS,
        ),
        attrs=("layer",),
        reference=_causal_conv_silu,
        idle="NY",
        sequential=True,
        flops=lambda s: s["T"] * s["F"] * (2 * s["W"] + 4),
        bytes=lambda s, held: (
            held["out"] + held["x"] + held["taps"] + 2 * held["conv"] // (s["N"] * s["Y"]) * s["R"]
        ),
        requires=(("X = W - 1", lambda s: s["X"] == s["W"] - 1),),
        cases=conv_cases,
        tolerance={
            "f32": Tolerance(
                0.0,
                0.0,
                "a float32 sum of W products errs by (W + 1) · 2^-24 of their magnitudes; silu by its slope",
                conv_bound,
            )
        },
    )
)

GATED_DELTA_RULE = declare(
    OpSpec(
        name="gated_delta_rule",
        doc="S ← e^g S; S ← S + k (β (v - Sᵀ k))ᵀ; out = Sᵀ q; g = -e^a_log · softplus(a + dt_bias)",
        operands=(
            Out("out", "T H V"),
            State("delta", "N Y H K V", STATES),
            In(
                "qkv", "T F"
            ),  # q of G key heads, k of as many, v of H value heads; neither normalised nor scaled
            In("a", "T H"),
            In("b", "T H"),  # β = sigmoid(b)
            In("a_log", "H"),
            In("dt_bias", "H"),
            *ROWS,
        ),
        # q and k of each head are divided by sqrt(Σ x² + eps), q by sqrt(K) too. Value head h reads key head
        # h // (H / G), as in Hugging Face's files; h mod G where tiled is 1, as in GGUF files.
        attrs=("layer", "eps", "tiled"),
        reference=_gated_delta_rule,
        idle="NY",
        sequential=True,
        flops=lambda s: 7 * s["T"] * s["H"] * s["K"] * s["V"],
        bytes=lambda s, held: (
            held["out"]
            + held["qkv"]
            + held["a"]
            + held["b"]
            + 2 * held["delta"] // (s["N"] * s["Y"]) * s["R"]
        ),
        requires=(
            (
                "F = 2 · G · K + H · V with H a multiple of G",
                lambda s: key_heads(s["F"], s["H"], s["K"], s["V"]) > 0,
            ),
        ),
        cases=delta_cases,
        tolerance={
            "f32": Tolerance(
                0.0,
                0.0,
                "float32 rounding of each token's update, carried by a recurrence that lengthens no error",
                delta_bound,
            )
        },
    )
)
