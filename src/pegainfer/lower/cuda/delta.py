"""Lowering of the recurrent layers: convolution, delta rule, and the gates around them."""

from __future__ import annotations

from pegainfer.lower.cuda.lowering import LoweringContext, blocks, handles
from pegainfer.lower.cuda.plan import Place, Struct, ptr, struct
from pegainfer.runtime.cuda.arguments import CONV, DELTA, DELTA_CHUNKS
from pegainfer.runtime.cuda.launch import f32, i32, i64
from pegainfer.runtime.cuda.tensor import item_bytes

# Members of StepRows and the operands that they are.
ROWS = {
    "ids": "state_ids", "saves": "state_saves", "starts": "query_starts", "lens": "query_lens",
    "contexts": "context_lens",
}  # fmt: skip
TILE = 64  # tokens of a row that one block of the convolution takes: kTile of conv.cu
CONV_THREADS = 128
CONV_TAPS = 4  # that the fast convolution is compiled for
KEY_DIM, COLUMNS, DELTA_THREADS = 128, 32, 128  # kKeys, kColumns and kThreads of delta.cuh
CHUNK = 64  # tokens: kChunk of chunk.cuh
PREPARE_THREADS, PREPARE_SHARED = 128, 36_352  # kPrepareThreads and kPrepareShared
SCAN_THREADS, SCAN_SHARED = 64, 98304  # kScanThreads and kScanShared
BLOCKS_PER_SM = 8  # of a chunk kernel, at most: each then takes several chunks or rows


@handles("causal_conv_silu")
def _causal_conv_silu(c: LoweringContext) -> None:
    s, dtype = c.sizes, _one_dtype(c, "x", "out", "conv")
    if s["X"] > TILE:
        raise c.refuse("taps", f"at most {TILE + 1}", s["W"])
    each = 16 // item_bytes(dtype)
    fast = s["W"] == CONV_TAPS and s["F"] % each == 0
    args = struct(
        CONV, out=c.address("out"), pool=_layer(c, "conv", s["X"] * s["F"]), x=c.address("x"),
        taps=c.vector("taps"), rows=_rows(c), entry=s["Y"] * s["X"] * s["F"], channels=s["F"], kept=s["X"],
        num_rows=s["R"],
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
        DELTA, out=c.address("out"), pool=_layer(c, "delta", entry), qkv=c.address("qkv"), a=c.address("a"),
        b=c.address("b"), a_log=c.vector("a_log"), dt_bias=c.vector("dt_bias"), rows=_rows(c),
        entry=s["Y"] * entry, channels=s["F"], heads=heads,
        key_heads=(s["F"] - heads * value_dim) // (2 * key_dim), key_dim=key_dim, value_dim=value_dim,
        eps=c.call.attrs["eps"], scale=key_dim**-0.5,
    )  # fmt: skip
    if key_dim != KEY_DIM or value_dim % COLUMNS:
        shared = 2 * key_dim * 4
        c.launch(f"delta_any_{dtype}", (blocks(value_dim, 32), heads, s["R"]), 32, [args], shared)
        return
    grid = (value_dim // COLUMNS, heads, s["R"])
    c.launch(f"delta_step_{dtype}", grid, DELTA_THREADS, [args])
    if c.step.decode_only:
        return
    if dtype == "bf16":
        _by_chunks(c, args)
    else:
        c.launch(f"delta_sequence_{dtype}", grid, DELTA_THREADS, [args])


def _by_chunks(c: LoweringContext, args: Struct) -> None:
    """Rows of several tokens in two launches: all chunks side by side, then each row's chunks in order."""
    tokens, rows, heads = c.sizes["T"], c.sizes["R"], c.sizes["H"]
    square = tokens * heads * CHUNK * item_bytes("bf16")
    chunk_args = struct(
        DELTA_CHUNKS, inverse=c.scratch(square), products=c.scratch(square),
        factors=c.scratch(tokens * heads * 16), num_rows=rows,
    )  # fmt: skip
    key_heads = (c.sizes["F"] - heads * c.sizes["V"]) // (2 * KEY_DIM)
    most = BLOCKS_PER_SM * c.target.info.num_sms
    chunks = min(tokens // 2, rows + tokens // CHUNK, blocks(most, key_heads))
    both = [args, chunk_args]
    c.launch("delta_chunk_prepare_bf16", (chunks, key_heads, 1), PREPARE_THREADS, both, PREPARE_SHARED)
    slices = c.sizes["V"] // COLUMNS
    at_once = min(rows, tokens // 2, blocks(most, slices * heads))
    c.launch("delta_chunk_scan_bf16", (slices, heads, at_once), SCAN_THREADS, both, SCAN_SHARED)


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


def _rows(c: LoweringContext) -> dict[str, Place]:
    """Members of StepRows."""
    return {member: c.address(operand) for member, operand in ROWS.items()}


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
