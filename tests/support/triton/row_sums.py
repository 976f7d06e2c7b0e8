# op row_sums: out[r] = sum of x[r], in float32.
#
# variant row_sums_bf16_64: dtype=bf16 block=64 warps=1 stages=2
# variant row_sums_f32_128: dtype=f32 block=128 warps=4 stages=3
"""A small Triton kernel: tests compile, load and launch it as a kernel of the package."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TYPES = {"out": "*fp32", "x": "*{dtype}", "columns": "i32"}
ALIGNED = ("out", "x")


@triton.jit
def kernel(
    out,  # [rows] f32
    x,  # [rows, columns]
    columns,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + lanes
        sums += tl.load(x + row.to(tl.int64) * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(sums, axis=0))
