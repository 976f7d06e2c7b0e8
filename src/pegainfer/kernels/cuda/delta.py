"""Lowering of the recurrent layers: convolution, delta rule, and the gates around them."""

from __future__ import annotations

from collections.abc import Sequence

from pegainfer.kernels.cuda.lowering import LoweringContext, blocks, handles
from pegainfer.kernels.cuda.plan import Place, ptr, struct
from pegainfer.runtime.cuda.launch import Arg, f32, i32, i64
from pegainfer.runtime.cuda.tensor import item_bytes

ROWS = ("state_ids", "state_saves", "query_starts", "query_lens", "context_lens")
TILE = 64  # tokens of a row that one block of the convolution takes: kTile of conv.cu
CONV_THREADS = 128
CONV_TAPS = 4  # that the fast convolution is compiled for
KEY_DIM, COLUMNS, DELTA_THREADS = 128, 32, 128  # kKeys, kColumns and kThreads of delta.cuh


@handles("causal_conv_silu")
def _causal_conv_silu(c: LoweringContext) -> None:
    s, dtype = c.sizes, _one_dtype(c, "x", "out", "conv")
    if s["X"] > TILE:
        raise c.refuse("taps", f"at most {TILE + 1}", s["W"])
    each = 16 // item_bytes(dtype)
    fast = s["W"] == CONV_TAPS and s["F"] % each == 0
    args = struct(
        ptr(c.address("out")), ptr(_layer(c, "conv", s["X"] * s["F"])), ptr(c.address("x")),
        ptr(c.vector("taps")), *_rows(c), i64(s["Y"] * s["X"] * s["F"]),
        *map(i32, (s["F"], s["X"], s["R"])),
    )  # fmt: skip
    across = blocks(s["F"], CONV_THREADS * (each if fast else 1))
    # Each row's last tile may be short; a row of one token is one tile.
    tiles = s["R"] if c.step.decode_only else min(s["T"], s["R"] + s["T"] // TILE)
    c.launch(f"causal_conv{'4' if fast else ''}_{dtype}", (across, tiles, 1), CONV_THREADS, [args])


@handles("gated_delta_rule")
def _gated_delta_rule(c: LoweringContext) -> None:
    s, dtype = c.sizes, _one_dtype(c, "qkv", "out", "a", "b")
    heads, key_dim, value_dim = s["H"], s["K"], s["V"]
    entry = heads * key_dim * value_dim
    args = struct(
        ptr(c.address("out")), ptr(_layer(c, "delta", entry)),
        *(ptr(c.address(name)) for name in ("qkv", "a", "b")),
        *(ptr(c.vector(name)) for name in ("a_log", "dt_bias")), *_rows(c), i64(s["Y"] * entry),
        *map(i32, (s["F"], heads, (s["F"] - heads * value_dim) // (2 * key_dim), key_dim, value_dim)),
        f32(c.call.attrs["eps"]), f32(key_dim**-0.5),
    )  # fmt: skip
    if key_dim != KEY_DIM or value_dim % COLUMNS:
        shared = 2 * key_dim * 4
        c.launch(f"delta_any_{dtype}", (blocks(value_dim, 32), heads, s["R"]), 32, [args], shared)
        return
    grid = (value_dim // COLUMNS, heads, s["R"])
    c.launch(f"delta_step_{dtype}", grid, DELTA_THREADS, [args])
    if not c.step.decode_only:
        c.launch(f"delta_sequence_{dtype}", grid, DELTA_THREADS, [args])


@handles("gated_rms_norm")
def _gated_rms_norm(c: LoweringContext) -> None:
    s, dtype = c.sizes, _one_dtype(c, "x", "out", "gate")
    heads = s["T"] * s["H"]
    args = [
        *(ptr(c.address(name)) for name in ("out", "x", "gate")), ptr(c.vector("weight")), i64(heads),
        i32(s["D"]), f32(c.call.attrs["eps"]),
    ]  # fmt: skip
    suffix = "" if s["D"] % 4 == 0 else "_any"
    c.launch(f"gated_rms_norm_{dtype}{suffix}", (blocks(heads, 8), 1, 1), 256, args)


@handles("sigmoid_gate")
def _sigmoid_gate(c: LoweringContext) -> None:
    s, dtype = c.sizes, _one_dtype(c, "x", "gate")
    count, each = s["T"] * s["A"], 16 // item_bytes(dtype)
    suffix, each = ("", each) if count % each == 0 else ("_any", 1)
    grid = min(blocks(count, 256 * each), 8 * c.target.info.num_sms)
    args = [ptr(c.address("x")), ptr(c.address("gate")), i64(count)]
    c.launch(f"sigmoid_gate_{dtype}{suffix}", (grid, 1, 1), 256, args)


def _rows(c: LoweringContext) -> Sequence[Arg]:
    """StepRows of rows.cuh."""
    return [ptr(c.address(name)) for name in ROWS]


def _layer(c: LoweringContext, state: str, elements: int) -> Place:
    """Address of the layer's part of state 0, where a layer has so many elements."""
    return c.address(state) + int(c.call.attrs["layer"]) * elements * item_bytes(c.dtype(state))


def _one_dtype(c: LoweringContext, first: str, *others: str) -> str:
    """The dtype that all of these operands have."""
    dtype = c.dtype(first)
    for name in others:
        if c.dtype(name) != dtype:
            raise c.refuse(f"dtype of {name}", dtype, c.dtype(name))
    return dtype
