# op linear, linear_residual, gate_up_swiglu, qkv_norm_rope_append, lm_head: out = x · wᵀ for 17 to 128 rows,
# where no kernel is written for the architecture itself.
#
# variant tiled_bf16_store_32: dtype=bf16 out=0 bm=32 bn=64 bk=128 warps=4 stages=4
# variant tiled_bf16_storef32_32: dtype=bf16 out=1 bm=32 bn=64 bk=128 warps=4 stages=4
# variant tiled_bf16_residual_32: dtype=bf16 out=2 bm=32 bn=64 bk=128 warps=4 stages=4
# variant tiled_bf16_swiglu_32: dtype=bf16 out=3 bm=32 bn=64 bk=128 warps=4 stages=4
# variant tiled_bf16_store_64: dtype=bf16 out=0 bm=64 bn=64 bk=64 warps=4 stages=5
# variant tiled_bf16_storef32_64: dtype=bf16 out=1 bm=64 bn=64 bk=64 warps=4 stages=5
# variant tiled_bf16_residual_64: dtype=bf16 out=2 bm=64 bn=64 bk=64 warps=4 stages=5
# variant tiled_bf16_swiglu_64: dtype=bf16 out=3 bm=64 bn=64 bk=64 warps=4 stages=5
# variant tiled_bf16_store_128: dtype=bf16 out=0 bm=128 bn=64 bk=64 warps=8 stages=4
# variant tiled_bf16_storef32_128: dtype=bf16 out=1 bm=128 bn=64 bk=64 warps=8 stages=4
# variant tiled_bf16_residual_128: dtype=bf16 out=2 bm=128 bn=64 bk=64 warps=8 stages=4
# variant tiled_bf16_swiglu_128: dtype=bf16 out=3 bm=128 bn=64 bk=64 warps=8 stages=4
"""Few rows against a streamed weight: tensor cores of any architecture, k in parts.

Each program owns bn rows of w and one part of k. Parts meet in float32 in `partial`; a counter tells who is
last, and the last one adds them in their order, so that a rerun is equal bit by bit.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# A parameter's type in a signature, by its name; all others are compile-time numbers from the variant's line.
TYPES = {
    "out": {"0": "*{dtype}", "1": "*fp32", "2": "*{dtype}", "3": "*{dtype}"},
    "x": "*{dtype}",
    "w": "*{dtype}",
    "partial": "*fp32",
    "arrivals": "*i32",
    "m": "i32",
    "n": "i32",
    "k": "i32",
    "splits": "i32",
}
ALIGNED = ("out", "x", "w", "partial", "k")  # multiples of 16 (bytes, elements)


@triton.jit
def kernel(
    out,  # [m, n], or [m, n / 2] of gate and up in pairs
    x,  # [m, k]
    w,  # [n, k]
    partial,  # [splits, m, n] f32
    arrivals,  # [tiles], zero before and after
    m,
    n,
    k,
    splits,
    OUT: tl.constexpr,  # 0 store, 1 the same in float32, 2 out += …, 3 silu(gate) · up
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.arange(0, BM)
    columns = tile * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    live = rows < m
    wide = columns < n
    chunks = tl.cdiv(k, BK)
    first = chunks * split // splits
    stop = chunks * (split + 1) // splits
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_at = x + rows[:, None].to(tl.int64) * k + depth[None, :]
    w_at = w + columns[:, None].to(tl.int64) * k + depth[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for chunk in range(first, stop):
        inside = depth < k - chunk * BK
        a = tl.load(x_at + chunk * BK, mask=live[:, None] & inside[None, :], other=0.0)
        b = tl.load(w_at + chunk * BK, mask=wide[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc)
    valid = live[:, None] & wide[None, :]
    last = splits == 1
    if splits > 1:
        mine = partial + (split * m + rows[:, None]).to(tl.int64) * n + columns[None, :]
        tl.store(mine, acc, mask=valid)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if last:
            tl.debug_barrier()
            acc = tl.zeros((BM, BN), tl.float32)
            for i in range(splits):
                theirs = partial + (i * m + rows[:, None]).to(tl.int64) * n + columns[None, :]
                acc += tl.load(theirs, mask=valid, other=0.0, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if last:
        if OUT == 3:
            gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
            result = gate * tl.sigmoid(gate) * up
            half = tile * (BN // 2) + tl.arange(0, BN // 2)
            at = out + rows[:, None].to(tl.int64) * (n // 2) + half[None, :]
            tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None] & (half < n // 2)[None, :])
        else:
            at = out + rows[:, None].to(tl.int64) * n + columns[None, :]
            if OUT == 2:
                acc += tl.load(at, mask=valid, other=0.0).to(tl.float32)
            tl.store(at, acc.to(out.dtype.element_ty), mask=valid)
