"""Lowering of sums over ranks, and of matrices whose columns each rank makes some of."""

from __future__ import annotations

from pegainfer.lower.cuda.lowering import LoweringContext, blocks, handles
from pegainfer.lower.cuda.plan import CONTROL, Place, ptr, struct
from pegainfer.lower.cuda.target import Target
from pegainfer.runtime.cuda.arguments import GATHER_RANKS, SUM_RANKS
from pegainfer.runtime.cuda.launch import i64
from pegainfer.runtime.cuda.peers import PART_BYTES, PART_VALUES, SAMPLED_BYTES, TAGGED_BYTES
from pegainfer.runtime.cuda.tensor import item_bytes

THREADS, WIDTH, MAX_BLOCKS = 256, 4, 128  # of kernels/cuda/include/ranks.cuh
TILE = 16  # columns
SAMPLED_ROWS = SAMPLED_BYTES // (2 * 512 * 16)  # of a sampler's launch; two places of WORDS tagged words each
# Bytes that a rank sends the others, by bench/cuda_allreduce.py on two H200 (docs/lab/h200.md). Up to the
# first, each value is sent with a tag beside it, which doubles what is sent; above the second, two exchanges
# of fewer bytes are made. A tagged sum that also computes the norm saves a launch, so its limit is higher.
TAGGED_MOST, ONE_SHOT_MOST, TAGGED_NORM_MOST = 384 << 10, 2 << 20, TAGGED_BYTES // 2


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
    kind, why, most = _kind(4 * count, c.target.ranks)
    for first in range(0, count, most):
        values = min(most, count - first)
        sum_args = struct(
            SUM_RANKS, x=c.address("x") + first * item_bytes(dtype), partial=c.address("partial") + 4 * first,
            control=Place(CONTROL), count=values,
        )  # fmt: skip
        grid = min(blocks(values, THREADS * WIDTH), MAX_BLOCKS)
        c.launch(f"sum_ranks_{kind}_{dtype}", (grid, 1, 1), THREADS, [sum_args], why=why)


def tagged_most(ranks: int) -> int:
    """Most bytes of a rank's part whose values are sent to every other rank with tags."""
    return TAGGED_MOST // max(1, ranks - 1)


def tagged_norm_most(ranks: int) -> int:
    """The same for a sum that begins the norm behind it."""
    return TAGGED_NORM_MOST // max(1, ranks - 1)


def one_shot_most(ranks: int) -> int:
    """Most bytes of a rank's part that is sent to every other rank as a whole."""
    return ONE_SHOT_MOST // max(1, ranks - 1)


def _kind(nbytes: int, ranks: int) -> tuple[str, str, int]:
    """The kernel for parts of so many bytes, why, and the most values of a launch."""
    if nbytes <= tagged_most(ranks):
        return "tagged", "few bytes", TAGGED_BYTES // 8
    if nbytes <= one_shot_most(ranks):
        return "one_shot", "some bytes", PART_VALUES
    return "two_shot", "many bytes", PART_VALUES * ranks


def shard_of(columns: int, target: Target) -> range | None:
    """The columns of the logits that this rank makes; None where each rank makes all of them."""
    each = _each(columns, target)
    first = target.rank * each
    shared = target.ranks > 1 and columns % WIDTH == 0 and (target.ranks - 1) * each < columns
    return range(first, min(first + each, columns)) if shared and 4 * each <= PART_BYTES else None


def gather(c: LoweringContext, out: Place, part: Place, rows: int, columns: int, wanted: Place) -> None:
    """Every rank gets the same float32 rows, bit by bit: each column was made by one rank alone.

    Args:
        out: [rows, columns].
        part: [rows, this rank's columns], see `shard_of`.
        wanted: [rows] int32; rows of negative numbers are left out.
    """
    each = _each(columns, c.target)
    args = struct(
        GATHER_RANKS, out=out, part=part, wanted=wanted, control=Place(CONTROL), rows=rows, columns=columns,
        each=each, most=PART_BYTES // (4 * each),
    )  # fmt: skip
    grid = min(blocks(each, THREADS * WIDTH), MAX_BLOCKS)
    c.launch("gather_ranks", (grid, 1, 1), THREADS, [args], why="each rank made some of the columns")


def _each(columns: int, target: Target) -> int:
    """Columns of a rank but the last: whole tiles of the tensor cores."""
    return blocks(columns, target.ranks * TILE) * TILE
