"""GEMMs with FP8 weights on Hopper: which weights stay in FP8, and the launches for many rows.

Up to 32 rows, activations keep all their bits and the weight is streamed (skinny.py). More of them are
quantised to E4M3 with a scale for each token and 128 columns, whatever scheme the checkpoint names for
activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pegainfer.lower.cuda.lowering import LoweringContext, blocks
from pegainfer.lower.cuda.plan import ARRIVALS, Boxes, Codes, Matrix, Place, Scales, ptr, struct
from pegainfer.lower.cuda.skinny import KINDS
from pegainfer.lower.cuda.target import SYSTEM, Target
from pegainfer.ops.tensor import Tensor
from pegainfer.runtime.cuda.arguments import FP8_GEMM
from pegainfer.runtime.cuda.launch import f32, i32

# Forms that kernels read -> what their names say: a scale a row, or for 128 columns of a row.
WEIGHTS = {"fp8_r128": "fp8_rows", "fp8_g128": "fp8_groups"}
GROUP, TOKENS, THREADS = 128, 128, 384  # as in sm90/gemm/fp8.cuh
COLUMNS = (64, 96, 128, 160)  # rows of the weight in a tile, that kernels are compiled for
MOST_SPLITS, LEAST_GROUPS = 8, 4  # of k; groups of 128 that a split has at least
MOST_DEPTH = 8  # stages of the ring


def keeps_fp8(target: Target) -> bool:
    """Whether there are kernels for FP8 weights."""
    return target.info.capability == (9, 0)


def stays_fp8(tensors: Iterable[Tensor], dtype: str, target: Target) -> str:
    """The kernels' name for weights that are kept in FP8; '' for those that are expanded to `dtype`.

    tensors: weights that are one matrix. dtype: of the activations.
    """
    forms, rows = set(), []
    for t in tensors:
        forms.add(t.dtype)
        rows.append(t.shape[0])
    whole = all(isinstance(n, int) and n % 8 == 0 for n in rows)
    if not keeps_fp8(target) or dtype != "bf16" or len(forms) != 1 or not whole:
        return ""
    return WEIGHTS.get(forms.pop(), "")


def codes_and_scales(w: Place) -> tuple[Place, Place]:
    """The two parts of an FP8 weight, of a place that names it as a Matrix."""
    assert isinstance(w.held, Matrix)
    return Place(Codes(w.held.tensors, w.held.layout)), Place(Scales(w.held.tensors, w.held.layout))


@dataclass(frozen=True)
class Fp8Choice:
    """A launch of sm90/gemm/fp8.cuh, with one ahead of it that quantises x."""

    kernel: str
    columns: int  # rows of w in a tile
    tiles_m: int
    tiles_n: int
    splits: int  # of k
    blocks: int
    depth: int  # stages of the ring
    shared: int  # bytes
    why: str

    @property
    def sums(self) -> int:
        """Bytes of the sums that splits leave for each other."""
        if self.splits == 1:
            return 0
        return 4 * self.splits * self.tiles_m * self.tiles_n * TOKENS * self.columns

    @property
    def reason(self) -> str:
        return (
            f"{self.tiles_m} x {self.tiles_n} tiles of {TOKENS} x {self.columns}, {self.splits} splits, "
            f"{self.blocks} blocks, {self.depth} stages ({self.why})"
        )

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


def choose_fp8(weights: str, m: int, n: int, k: int, target: Target) -> Fp8Choice:
    """The launch for a problem of more rows than skinny.py takes: the measured tiles, else the cheapest."""
    tuned = target.tuning.find(target.info, "fp8", m, n=n, k=k)
    if tuned is not None and tuned.numbers is not None:
        why = f"{m} rows; measured on {tuned.card} up to {tuned.most} rows"
        return fp8_choice(weights, m, n, target, why=why, **tuned.numbers)
    sms, tiles_m = target.info.num_sms, blocks(m, TOKENS)

    def splits_of(columns: int) -> int:
        return max(1, min(sms // (tiles_m * blocks(n, columns)), k // GROUP // LEAST_GROUPS, MOST_SPLITS))

    def cost(columns: int) -> float:
        """The approximate cost of the busiest block, in bytes read from memory.

        x and a tile's sums come from L2: x counts half, a float32 sum one byte.
        """
        splits = splits_of(columns)
        rounds = blocks(tiles_m * blocks(n, columns) * splits, sms)
        sums = splits * columns * TOKENS if splits > 1 else 0
        return rounds * (columns + TOKENS / 2) * k / splits + sums

    columns = min(COLUMNS, key=cost)
    return fp8_choice(weights, m, n, target, columns=columns, splits=splits_of(columns))


def fp8_choice(
    weights: str, m: int, n: int, target: Target, *, columns: int, splits: int = 1, why: str = ""
) -> Fp8Choice:
    """That launch with the deepest ring that fits."""
    tiles_m, tiles_n = blocks(m, TOKENS), blocks(n, columns)
    stage = (TOKENS + columns) * GROUP + (2048 if columns > 128 else 1024)
    depth = min(MOST_DEPTH, (target.info.max_shared - SYSTEM) // (stage + 16))
    return Fp8Choice(
        f"{weights}_bf16_{columns}", columns, tiles_m, tiles_n, splits,
        min(target.info.num_sms, tiles_m * tiles_n * splits), depth, depth * (stage + 16) + 16,
        why or f"{m} rows",
    )  # fmt: skip


def quantize_rows(
    c: LoweringContext, x: Place, m: int, k: int, norm: Place | None, eps: float
) -> tuple[Place, Place]:
    """Codes [m, k] and scales [k / 128, pitch] of x [m, k], normalised first where a norm is given."""
    pitch = blocks(m, TOKENS) * TOKENS
    codes, scales = c.scratch(m * k), c.scratch(4 * (k // GROUP) * pitch)
    threads = min(1024, blocks(k // 8, 32) * 32)
    args = [ptr(codes), ptr(scales), ptr(x), ptr(norm), i32(k), i32(pitch), f32(eps)]
    c.launch("quantize_rows_bf16", (m, 1, 1), threads, args, why="activations of an FP8 GEMM")
    return codes, scales


def fp8_gemm(
    c: LoweringContext,
    choice: Fp8Choice,
    kind: str,
    sizes: tuple[int, int, int],
    out: Place,
    x: Place,
    w: Place,
    *,
    ld_out: int | None = None,
    norm: Place | None = None,
    eps: float = 0.0,
) -> None:
    """Lowers one GEMM; arguments as gemm.project has them."""
    m, n, k = sizes
    w_codes, w_scales = codes_and_scales(w)
    codes, scales = quantize_rows(c, x, m, k, norm, eps)
    sums = c.scratch(choice.sums) if choice.sums else None
    boxes = (
        Boxes(w_codes, (n, k), (k,), "f8_e4m3", (choice.columns, GROUP), promotion=256),
        Boxes(codes, (m, k), (k,), "f8_e4m3", (TOKENS, GROUP), promotion=256),
    )
    args = struct(
        FP8_GEMM, out=out, x_scales=scales, w_scales=w_scales, sums=sums, arrivals=Place(ARRIVALS), m=m,
        n=n, k=k, ld_out=ld_out or (n // 2 if kind == "swiglu" else n), pitch=blocks(m, TOKENS) * TOKENS,
        kind=KINDS[kind], tiles_m=choice.tiles_m, tiles_n=choice.tiles_n, splits=choice.splits,
        depth=choice.depth,
    )  # fmt: skip
    c.launch(choice.kernel, (choice.blocks, 1, 1), THREADS, [*boxes, args], choice.shared, why=choice.reason)
