"""Lowering of the recurrent layers: convolution, delta rule, and the gates around them."""

from __future__ import annotations

from pegainfer.lower.cuda.gemm import project
from pegainfer.lower.cuda.linear import gemm_problem, scale_of
from pegainfer.lower.cuda.lowering import LoweringContext, blocks, handles
from pegainfer.lower.cuda.plan import ARRIVALS, Place, Struct, ptr, struct
from pegainfer.ops.program import OpCall
from pegainfer.ops.recurrence import key_heads
from pegainfer.runtime.cuda.arguments import CONV, DELTA, DELTA_CHUNKS, DELTA_DECODE
from pegainfer.runtime.cuda.launch import f32, i32, i64
from pegainfer.runtime.cuda.tensor import item_bytes

# Members of StepRows and the operands that they are.
ROWS = {
    "ids": "state_ids", "saves": "state_saves", "starts": "query_starts", "lens": "query_lens",
    "contexts": "context_lens",
}  # fmt: skip
TILE = 8  # tokens of a row that one block of the convolution takes: kTile of conv.cu
CONV_THREADS = 128
CONV_TAPS = 4  # that the fast convolution is compiled for
KEY_DIM, COLUMNS, DELTA_THREADS = 128, 32, 128  # kKeys, kColumns and kThreads of delta.cuh
DECODE_THREADS, DECODE_PER_SM = 256, 2  # kDecodeThreads of decode.cuh, and its blocks on an SM
RING_THREADS, RING_STAGES = 544, 3  # kRingThreads and kRingStages of sm90/delta/decode.cuh
RING_HEADS = 5  # value heads an SM above which the kernel with a ring of matrices is faster
CHUNK = 64  # tokens: kChunk of chunk.cuh
PREPARE_THREADS, PREPARE_SHARED = 128, 36_352  # kPrepareThreads and kPrepareShared
SCAN_THREADS, SCAN_STAGE, SCAN_TILES = 256, 48_128, 20_480  # kScanThreads, kStage and kWorkTiles of scan.cuh
SCAN_STAGES = 3  # chunks that a block of the scan holds or loads, at most
BLOCKS_PER_SM = 8  # of a chunk kernel, at most: each then takes several chunks or rows


@handles("causal_conv_silu")
def _causal_conv_silu(c: LoweringContext) -> None:
    c.one_dtype("x", "out", "conv")
    _convolve(c, c.address("out"), c.address("x"), c.sizes["F"])


def _convolve(c: LoweringContext, out: Place, x: Place, x_stride: int) -> None:
    """`x_stride`: elements from a token of x to the next."""
    s, dtype = c.sizes, c.dtype("x")
    if s["X"] > TILE:
        raise c.refuse("taps", f"at most {TILE + 1}", s["W"])
    each = 16 // item_bytes(dtype)
    fast = s["W"] == CONV_TAPS and s["F"] % each == 0 and x_stride % each == 0
    args = struct(
        CONV, out=out, pool=_layer(c, "conv", s["X"] * s["F"]), x=x, taps=c.vector("taps"), rows=_rows(c),
        entry=s["Y"] * s["X"] * s["F"], x_stride=x_stride, channels=s["F"], kept=s["X"], num_rows=s["R"],
    )  # fmt: skip
    across = blocks(s["F"], CONV_THREADS * (each if fast else 1))
    # Each row's last tile may be short; a row of one token is one tile.
    tiles = s["R"] if c.step.decode_only else min(s["T"], s["R"] + s["T"] // TILE)
    c.launch(f"causal_conv{'4' if fast else ''}_{dtype}", (across, tiles, 1), CONV_THREADS, [args])


@handles("gated_delta_rule")
def _gated_delta_rule(c: LoweringContext) -> None:
    c.one_dtype("qkv", "out", "a", "b")
    out, qkv, a, b = (c.address(name) for name in ("out", "qkv", "a", "b"))
    _delta_rule(c, out, qkv, a, b, c.sizes["H"], c.call.attrs["eps"])


def _delta_rule(
    c: LoweringContext, out: Place, qkv: Place, a: Place, b: Place, gate_stride: int, eps: float
) -> None:
    """`gate_stride`: elements from a token of a or b to the next."""
    s, dtype = c.sizes, c.dtype("out")
    heads, key_dim, value_dim = s["H"], s["K"], s["V"]
    entry = heads * key_dim * value_dim
    args = struct(
        DELTA, out=out, pool=_layer(c, "delta", entry), qkv=qkv, a=a, b=b, a_log=c.vector("a_log"),
        dt_bias=c.vector("dt_bias"), rows=_rows(c), entry=s["Y"] * entry, gate_stride=gate_stride,
        channels=s["F"], heads=heads, key_heads=_key_heads(c), key_dim=key_dim, value_dim=value_dim, eps=eps,
        scale=key_dim**-0.5, tiled=int(c.call.attrs["tiled"]),
    )  # fmt: skip
    any_size = key_dim != KEY_DIM or value_dim % COLUMNS != 0
    suffix = _states(c, dtype, any_size)
    if any_size:
        shared = 2 * key_dim * 4
        c.launch(f"delta_any_{dtype}", (blocks(value_dim, 32), heads, s["R"]), 32, [args], shared)
        return
    grid = (value_dim // COLUMNS, heads, s["R"])
    c.launch(f"delta_step_{suffix}", grid, DELTA_THREADS, [args])
    if c.step.decode_only:
        return
    if dtype == "bf16":
        _by_chunks(c, args, suffix)
    else:
        c.launch(f"delta_sequence_{dtype}", grid, DELTA_THREADS, [args])


def _states(c: LoweringContext, dtype: str, any_size: bool = False) -> str:
    """The suffix of a kernel's name: the dtype of activations, then that of states unless it is float32."""
    stored = c.dtype("delta")
    if stored == "f32":
        return dtype
    if dtype != "bf16" or any_size:
        wanted = f"f32; bf16 with activations of bf16, keys of {KEY_DIM} and values of multiples of {COLUMNS}"
        raise c.refuse("dtype of delta", wanted, stored)
    return f"{dtype}_{stored}"


def _by_chunks(c: LoweringContext, args: Struct, suffix: str) -> None:
    """Rows of several tokens in two launches: all chunks side by side, then each row's chunks in order."""
    tokens, rows, heads = c.sizes["T"], c.sizes["R"], c.sizes["H"]
    square = tokens * heads * CHUNK * item_bytes("bf16")
    most = BLOCKS_PER_SM * c.target.info.num_sms
    slices = c.sizes["V"] // COLUMNS
    at_once = min(rows, tokens // 2, blocks(most, slices * heads))
    stages = max(1, min(SCAN_STAGES, (c.target.info.max_shared - SCAN_TILES) // SCAN_STAGE))
    chunk_args = struct(
        DELTA_CHUNKS, inverse=c.scratch(square), products=c.scratch(square),
        factors=c.scratch(tokens * heads * 16), num_rows=rows, stages=stages,
    )  # fmt: skip
    chunks = min(tokens // 2, rows + tokens // CHUNK, blocks(most, _key_heads(c)))
    both = [args, chunk_args]
    c.launch("delta_chunk_prepare_bf16", (chunks, _key_heads(c), 1), PREPARE_THREADS, both, PREPARE_SHARED)
    shared = stages * SCAN_STAGE + SCAN_TILES
    c.launch(f"delta_chunk_scan_{suffix}", (slices, heads, at_once), SCAN_THREADS, both, shared)


@handles("gated_rms_norm")
def _gated_rms_norm(c: LoweringContext) -> None:
    s = c.sizes
    c.one_dtype("x", "out", "gate")
    out, x, gate = (c.address(name) for name in ("out", "x", "gate"))
    _gated_norm(c, out, x, gate, c.vector("weight"), s["H"], s["D"], s["H"] * s["D"])


def _gated_norm(
    c: LoweringContext, out: Place, x: Place, gate: Place, weight: Place | None, heads: int, width: int,
    gate_stride: int,
) -> None:  # fmt: skip
    """`gate_stride`: elements from a token of the gate to the next."""
    count = c.sizes["T"] * heads
    args = [
        *map(ptr, (out, x, gate, weight)), i64(count), i32(heads), i32(width), i64(gate_stride),
        f32(c.call.attrs["eps"]),
    ]  # fmt: skip
    suffix = "" if width % 4 == 0 and gate_stride % 4 == 0 else "_any"
    c.launch(f"gated_rms_norm_{c.dtype('out')}{suffix}", (blocks(count, 8), 1, 1), 256, args)


def _one_buffer(call: OpCall) -> bool:
    """Whether one GEMM may leave all projections side by side, in rows that vectors of 16 bytes can read."""
    x, out, conv = (call.tensors[name] for name in ("x", "out", "conv"))
    channels, gate, heads, width = (call.axes[axis] for axis in "FAHM")
    sizes = (channels, gate, 2 * heads, width) if isinstance(heads, int) else ()
    aligned = bool(sizes) and all(isinstance(n, int) and n % 8 == 0 for n in sizes)
    return aligned and x.dtype == out.dtype == conv.dtype


@handles("gated_delta", "scaled_gated_delta", whole=_one_buffer)
def _gated_delta(c: LoweringContext) -> None:
    """One GEMM for all projections; rows of one token alone in one more launch, others by the parts."""
    s, dtype = c.sizes, c.dtype("x")
    problem = gemm_problem(c.call, s, c.target)
    stride, item, heads = problem.n, item_bytes(dtype), s["H"]
    projected = c.scratch(s["T"] * stride * item)
    project(
        c, problem, projected, c.address("x"), c.matrix("w_qkv", "w_z", "w_a", "w_b", dtype=dtype),
        norm=c.vector("norm"), eps=c.call.attrs["eps"], scale=scale_of(c),
    )  # fmt: skip
    if c.step.decode_only and s["K"] == s["V"] == KEY_DIM and s["W"] == CONV_TAPS:
        _decode(c, projected, stride)
        return
    gate = projected + s["F"] * item
    a = gate + s["A"] * item
    convolved, mixed = (c.scratch(s["T"] * s[width] * item) for width in "FA")
    _convolve(c, convolved, projected, stride)
    _delta_rule(c, mixed, convolved, a, a + heads * item, stride, c.call.attrs["key_eps"])
    _gated_norm(c, c.address("out"), mixed, gate, c.vector("out_norm"), heads, s["V"], stride)


def _decode(c: LoweringContext, projected: Place, stride: int) -> None:
    s, attrs = c.sizes, c.call.attrs
    conv, matrices = s["X"] * s["F"], s["H"] * s["K"] * s["V"]
    sms, keys = c.target.info.num_sms, _key_heads(c)
    most = DECODE_PER_SM * sms
    kernel, threads = f"delta_decode_{_states(c, c.dtype('x'))}", DECODE_THREADS
    shared = s["K"] * s["V"] * item_bytes(c.dtype("delta"))  # a head's matrix
    many = s["H"] * s["R"] > RING_HEADS * sms
    ring = many and c.target.info.arch == "90a" and kernel == "delta_decode_bf16"
    # Blocks that share no state need no atomics, which is worth a few idle ones.
    chain = s["H"] // keys if 4 * keys * s["R"] >= 3 * most and not ring else 1
    units, why = s["H"] * s["R"] // chain, f"{chain} value heads a block in turn"
    if ring:
        kernel, threads, shared = "delta_decode_ring_bf16", RING_THREADS, RING_STAGES * shared
        most, why = sms, "value heads claimed one by one"
    args = struct(
        DELTA_DECODE, out=c.address("out"), conv=_layer(c, "conv", conv), delta=_layer(c, "delta", matrices),
        x=projected, taps=c.vector("taps"), a_log=c.vector("a_log"), dt_bias=c.vector("dt_bias"),
        norm=c.vector("out_norm"), arrivals=Place(ARRIVALS), rows=_rows(c), conv_entry=s["Y"] * conv,
        delta_entry=s["Y"] * matrices, x_stride=stride, heads=s["H"], key_heads=keys,
        chain=chain, units=units, eps=attrs["eps"], key_eps=attrs["key_eps"], tiled=int(attrs["tiled"]),
    )  # fmt: skip
    c.launch(kernel, (min(units, most), 1, 1), threads, [args], shared, why=f"rows of one token, {why}")


def _key_heads(c: LoweringContext) -> int:
    s = c.sizes
    return key_heads(s["F"], s["H"], s["K"], s["V"])


@handles("sigmoid_gate")
def _sigmoid_gate(c: LoweringContext) -> None:
    c.one_dtype("x", "gate")
    _gate(c, c.address("gate"), c.sizes["A"], c.sizes["A"])


@handles("gate_heads")
def _gate_heads(c: LoweringContext) -> None:
    """The gate's heads come last."""
    s, dtype = c.sizes, c.one_dtype("x", "heads")
    before = (s["E"] - s["H"]) * s["D"]
    _gate(c, c.address("heads") + before * item_bytes(dtype), s["H"] * s["D"], s["E"] * s["D"])


def _gate(c: LoweringContext, gate: Place, width: int, stride: int) -> None:
    """`stride`: elements from a token of the gate to the next."""
    dtype, count = c.dtype("x"), c.sizes["T"] * width
    each = 16 // item_bytes(dtype)
    suffix, each = ("", each) if width % each == stride % each == 0 else ("_any", 1)
    grid = min(blocks(count, 256 * each), 8 * c.target.info.num_sms)
    args = [ptr(c.address("x")), ptr(gate), i64(count), i32(width), i64(stride)]
    c.launch(f"sigmoid_gate_{dtype}{suffix}", (grid, 1, 1), 256, args)


def _rows(c: LoweringContext) -> dict[str, Place]:
    """Members of StepRows."""
    return {member: c.address(operand) for member, operand in ROWS.items()}


def _layer(c: LoweringContext, state: str, elements: int) -> Place:
    """Address of the layer's part of state 0, where a layer has so many elements."""
    return c.address(state) + int(c.call.attrs["layer"]) * elements * item_bytes(c.dtype(state))
