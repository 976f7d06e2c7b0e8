"""Lowering of sums over ranks."""

from __future__ import annotations

from pegainfer.lower.cuda.lowering import LoweringContext, blocks, handles
from pegainfer.lower.cuda.plan import CONTROL, Place, ptr, struct
from pegainfer.runtime.cuda.arguments import SUM_RANKS
from pegainfer.runtime.cuda.launch import i64
from pegainfer.runtime.cuda.peers import PART_VALUES
from pegainfer.runtime.cuda.tensor import item_bytes

THREADS, WIDTH, MAX_BLOCKS = 256, 4, 64  # THREADS and WIDTH of sum.cu; at most MAX_BLOCKS of ranks.cuh
ONE_SHOT_BYTES = 512 << 10  # of a rank's part.


@handles("reduce_residual")
def _reduce_residual(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("x")
    count = s["T"] * s["N"]
    if c.target.ranks == 1:
        grid = min(blocks(count, 256), 8 * c.target.info.num_sms)
        args = [ptr(c.address("x")), ptr(c.address("partial")), i64(count)]
        c.launch(f"reduce_residual_{dtype}", (grid, 1, 1), 256, args)
        return
    if s["N"] % WIDTH:
        raise c.refuse("N", f"a multiple of {WIDTH}", s["N"])
    shots, why = ("one", "few bytes") if 4 * count <= ONE_SHOT_BYTES else ("two", "many bytes")
    most = PART_VALUES * (1 if shots == "one" else c.target.ranks)  # in one launch
    for first in range(0, count, most):
        values = min(most, count - first)
        sum_args = struct(
            SUM_RANKS, x=c.address("x") + first * item_bytes(dtype), partial=c.address("partial") + 4 * first,
            control=Place(CONTROL), count=values,
        )  # fmt: skip
        grid = min(blocks(values, THREADS * WIDTH), MAX_BLOCKS)
        c.launch(f"sum_ranks_{shots}_shot_{dtype}", (grid, 1, 1), THREADS, [sum_args], why=why)
