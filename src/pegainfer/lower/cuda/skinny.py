"""GEMMs of up to 64 rows on Hopper (sm90/gemm/skinny.cuh): the weight's shares, and the launch.

Long because the shared memory of a choice and the arguments of its launch must agree byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pegainfer.lower.cuda.lowering import LoweringContext
from pegainfer.lower.cuda.plan import Boxes, Place, PlannedArg, Struct, ptr, struct
from pegainfer.lower.cuda.target import SYSTEM, Target
from pegainfer.runtime.cuda.arguments import SKINNY
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.launch import i32
from pegainfer.runtime.cuda.tensor import item_bytes

TOKENS = (8, 16, 32, 64)  # that kernels are compiled for
MAX_TOKENS, BOX = 64, 64  # as in skinny.cuh; BOX: elements of k, 128 bytes
THREADS, MAX_BLOCKS = 256, 3  # MAX_BLOCKS: of 64 rows in a tile
MAX_FP8_TOKENS = 32  # of an FP8 weight: for more rows the kernel with one code a value is faster (fp8.py)
FP8_BOX = 128  # elements of k in a box of an FP8 weight and in a stage of x, which has two codes a value
SPLIT_THREADS, SPLIT_GROUPS = 256, 16  # of a block that splits x: threads, and groups of 128 columns
FRAGMENT = 576  # bytes of the sums of 16 rows by 8 tokens
KINDS = {"store": 0, "storef32": 1, "residual": 2, "swiglu": 3}


@dataclass(frozen=True)
class SkinnyChoice:
    """A launch of sm90/gemm/skinny.cuh, or of wide.cuh beside it."""

    kernel: str
    tokens: int  # rows of x in a stage
    groups: int  # of blocks; each takes every groups-th tile
    rows: int  # of w in a tile
    splits: int  # of k
    wide: int  # 64-element columns of a stage
    depth_w: int
    depth_x: int
    trigger: int  # stages before the end at which the next launch may start
    sums: int  # offset of a tile's sums in shared memory
    before: int  # offset of the epilogue's other inputs
    shared: int  # bytes
    why: str = ""
    threads: int = THREADS
    box: int = BOX  # elements of k in a box of the weight
    adapters: int = 0  # where the adapters' part of shared memory begins; 0: a kernel without adapters

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.splits, self.groups, 1)

    @property
    def cluster(self) -> int:
        return self.splits if self.splits > 1 else 0

    @property
    def most_tokens(self) -> int:
        """Rows of x that the kernel takes: so many sums of squares lie side by side."""
        return next(most for most in (MAX_TOKENS, 128, 256) if self.tokens <= most)

    def square_groups(self, n: int) -> int:
        """How many sums of squares a row of `n` outputs leaves."""
        return -(-n // self.rows) * -(-self.rows // 32)

    @property
    def reason(self) -> str:
        return (
            f"{self.groups} groups x {self.splits} splits of {self.rows} rows, "
            f"{self.depth_w} + {self.depth_x} stages of {self.box * self.wide}, {self.shared} B ({self.why})"
        )

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


@dataclass(frozen=True)
class Shares:
    """How a weight is shared out; see SkinnyChoice. `early`: sums are sent to a place of their own."""

    rows: int
    splits: int = 1
    wide: int = 1
    depth_x: int = 8
    early: bool = True
    per_sm: int = 2


# Share of the SMs that clusters of so many blocks can fill, one block an SM (GPUs lack SMs here and there).
FILLED = {1: 1.0, 2: 1.0, 3: 0.91, 4: 0.91, 5: 0.87}
LEAST_ROWS = 64  # of a tile: wgmma multiplies as many in any case
LEAST_FP8_ROWS = 96  # the same of an FP8 weight: relative to it, a block reads twice as many bytes of x
NEVER_MEASURED = "even shares, for a shape that was never measured"
MANY_TILES = 6  # a block: in so long a launch, deep rings matter more than overlap with other launches


def shares(m: int, n: int, k: int, target: Target, op: str = "skinny") -> tuple[Shares | None, str]:
    """The fastest measured shares, else the fewest splits of k whose even shares have enough rows; and the
    reason. None where the kernel for more rows is faster.
    """
    tuned = target.tuning.find(target.info, op, m, n=n, k=k)
    if tuned is not None:
        why = f"measured on {tuned.card} up to {tuned.most} rows"
        return Shares(**tuned.numbers) if tuned.numbers is not None else None, why
    if op == "skinny_lora":  # the same GEMM without adapters
        return shares(m, n, k, target)
    info = target.info
    rows, splits = even_shares(n, k, info, *((FP8_BOX, LEAST_FP8_ROWS) if op == "skinny_fp8" else ()))
    depth_x = 8 if m <= 16 else 4
    if rows <= MAX_BLOCKS * 64:
        return Shares(rows, splits, depth_x=depth_x, early=m <= 32), NEVER_MEASURED
    tiles = -(-n // (info.num_sms * (136 if m <= 32 else 64)))
    rows = _eights(n, info.num_sms * tiles)
    if tiles >= MANY_TILES:
        return Shares(rows, wide=2, depth_x=6, per_sm=1), f"{tiles} tiles a block; {NEVER_MEASURED}"
    return Shares(rows, depth_x=depth_x), f"{tiles} tiles a block; {NEVER_MEASURED}"


def even_shares(n: int, k: int, info: DeviceInfo, box: int = BOX, least: int = LEAST_ROWS) -> tuple[int, int]:
    """(rows, splits of k) of the fewest splits whose even shares, one an SM, have at least `least` rows.

    box: elements of k in a box of the weight, of which each split has one at least.
    """
    rows, splits = 0, 1
    for splits, filled in FILLED.items():
        rows = _eights(n, int(info.num_sms * filled) // splits)
        if rows >= least or k < 2 * splits * box:
            break
    return rows, splits


def _eights(n: int, parts: int) -> int:
    """The smallest multiple of 8 that covers n with so many."""
    return -(-n // (8 * parts)) * 8


def choose_skinny(
    dtype: str,
    m: int,
    n: int,
    k: int,
    kind: str,
    target: Target,
    weights: str = "",
    adapters: Callable[[int], int] | None = None,
) -> SkinnyChoice | None:
    """The launch for a problem, or None where the kernel does not serve it. weights: see GemmProblem.
    adapters: bytes of shared memory that LoRA adapters take, by the rows of x in a stage."""
    most = MAX_FP8_TOKENS if weights else MAX_TOKENS
    if target.info.capability != (9, 0) or m > most or n % 8 or k % 8:
        return None
    op = "skinny_fp8" if weights else "skinny" if adapters is None else "skinny_lora"
    s, why = shares(m, n, k, target, op)
    if s is None:
        return None
    for depth_x in (s.depth_x, 4, 2):
        choice = skinny_choice(
            dtype, m, n, k, target.info, rows=s.rows, splits=s.splits, wide=s.wide, depth_x=depth_x,
            per_sm=s.per_sm, residual=kind == "residual", early=s.early, why=f"{m} rows; {why}",
            weights=weights, adapters=adapters,
        )  # fmt: skip
        if choice is not None:
            return choice
    return None


def skinny_choice(
    dtype: str,
    m: int,
    n: int,
    k: int,
    info: DeviceInfo,
    *,
    rows: int,
    splits: int = 1,
    wide: int = 1,
    depth_x: int = 4,
    depth_w: int = 0,
    trigger: int | None = None,
    per_sm: int = 2,
    residual: bool = False,
    early: bool = True,
    why: str = "",
    weights: str = "",
    adapters: Callable[[int], int] | None = None,
) -> SkinnyChoice | None:
    """That launch with the deepest ring that fits, or None where it does not fit."""
    tokens = next((t for t in TOKENS if m <= t), 0)
    blocks = -(-rows // 64)
    box = FP8_BOX if weights else BOX
    tiles, chunks = -(-n // rows), -(-k // (box * wide))
    if not tokens or blocks > MAX_BLOCKS or splits > chunks:
        return None
    groups = tiles if splits > 1 else min(tiles, info.num_sms)
    beside = adapters(tokens) + 16 if adapters is not None else 0
    room = min(info.shared_per_sm // per_sm - SYSTEM, info.max_shared) - beside
    stage_w, stage_x = rows * 128 * wide, tokens * 2 * (box if weights else box * wide)
    units = -(-rows // 32) * (tokens // 8)
    slots = -(-units // splits)
    sums = slots * splits * 2 * FRAGMENT
    scales = 4 * tokens * (1 + (depth_x if weights else 0))  # of x
    extra = 16 + scales + (slots * 512 + -(-rows // 32) * 128 if residual else 0)
    # The epilogue keeps sums in the rings' memory, unless copies of the next tile are in flight there, or
    # other blocks may send their sums before the rings are free.
    for own in (0, sums) if splits == 1 or not early else (sums,):
        rest = room - own - extra - depth_x * (stage_x + 16)
        depth = min(depth_w or 32, rest // (stage_w + 16))
        rings = depth * stage_w + depth_x * stage_x
        if depth >= 2 and (own or (tiles <= groups and rings >= sums)):
            break
    else:
        return None
    if residual and tiles > groups:
        return None
    barriers = rings + 16 * (depth + depth_x) + 16 + scales
    # wgmma reads 64 rows even of a smaller tile, so memory must extend past the last stage.
    shared = max(rings + 16 * (depth + depth_x) + extra + own, depth * stage_w + (blocks * 64 - rows) * 128)
    behind = -(-shared // 16) * 16 if beside else 0
    name = f"skinny_{'lora_' if beside else ''}{weights or dtype}_{tokens}_{blocks}"
    return SkinnyChoice(
        name, tokens, groups, rows, splits, wide, depth, depth_x, depth if trigger is None else trigger,
        barriers if own else 0, barriers + own, shared + beside, why, box=box, adapters=behind,
    )  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """Sums of squares that a GEMM's sums are scaled by: [groups, room for tokens] float32."""

    squares: Place
    groups: int


@dataclass(frozen=True)
class NextNorm:
    """Outputs of a residual's GEMM for the norm that follows it.

    Args:
        norm: that norm's weight.
        normed: of x times that weight, in x's dtype.
        squares: of sums of x's squares, SkinnyChoice.square_groups a token.
    """

    norm: Place
    normed: Place
    squares: Place


def skinny_args(
    c: SkinnyChoice,
    kind: str,
    sizes: tuple[int, int, int],
    out: Place,
    ld_out: int,
    scale: Scale | None,
    next_norm: NextNorm | None,
    eps: float,
) -> Struct:
    """skinny::Args."""
    m, n, k = sizes
    tiles, chunks = -(-n // c.rows), -(-k // (c.box * c.wide))
    left = (next_norm.norm, next_norm.normed, next_norm.squares) if next_norm else (None, None, None)
    norm, normed, next_squares = left
    return struct(
        SKINNY, out=out, squares=scale.squares if scale else None, norm=norm, normed=normed,
        next_squares=next_squares, m=m, n=n, k=k, ld_out=ld_out, kind=KINDS[kind], rows=c.rows,
        groups=c.groups, rounds=tiles // c.groups, longer=tiles % c.groups, splits=c.splits,
        chunks=chunks // c.splits, leftover=chunks % c.splits, wide=c.wide, depth_w=c.depth_w,
        depth_x=c.depth_x, trigger=c.trigger, square_groups=scale.groups if scale else 0, sums=c.sums,
        before=c.before, eps=eps,
    )  # fmt: skip


def skinny(
    c: LoweringContext,
    choice: SkinnyChoice,
    kind: str,
    dtype: str,
    sizes: tuple[int, int, int],
    out: Place,
    x: Place,
    w: Place,
    *,
    ld_out: int | None = None,
    scale: Scale | None = None,
    eps: float = 0.0,
    next_norm: NextNorm | None = None,
    scales: Place | None = None,
    adapters: Struct | None = None,
) -> None:
    """Lowers one GEMM.

    Args:
        sizes: m, n, k.
        scale: applied to the sums.
        next_norm: for kind 'residual'.
        scales: of an FP8 weight, whose codes are `w`.
        adapters: lora::Fused, for a choice with adapters.
    """
    m, n, k = sizes
    stored = dtype if scales is None else "f8_e4m3"
    weight = Boxes(w, (n, k), (k * item_bytes(stored),), stored, (choice.rows, choice.box), promotion=256)
    width = ld_out or (n // 2 if kind == "swiglu" else n)
    args = skinny_args(choice, kind, sizes, out, width, scale, next_norm, eps)
    if scales is None:
        box_x = Boxes(x, (m, k), (k * item_bytes(dtype),), dtype, (choice.tokens, BOX), promotion=256)
        arguments: list[PlannedArg] = [weight, box_x, args, *([adapters] if adapters else [])]
    else:
        codes, x_scales = split_rows(c, x, m, k)
        both = (2 * MAX_TOKENS, k)
        box_x = Boxes(codes, both, (k,), "f8_e4m3", (choice.tokens, FP8_BOX), promotion=256)
        arguments = [weight, box_x, args, ptr(scales), ptr(x_scales)]
    c.launch(
        choice.kernel, choice.grid, choice.threads, arguments, choice.shared, why=choice.reason,
        cluster=choice.cluster,
    )  # fmt: skip


def split_rows(c: LoweringContext, x: Place, m: int, k: int) -> tuple[Place, Place]:
    """x [m, k] in bf16 as sums of two codes [2, MAX_TOKENS, k], and their scales [k / 128, MAX_TOKENS]."""
    codes, scales = c.scratch(2 * MAX_TOKENS * k), c.scratch(4 * MAX_TOKENS * (k // FP8_BOX))
    grid = (-(-m * (k // FP8_BOX) // SPLIT_GROUPS), 1, 1)
    args = [ptr(codes), ptr(scales), ptr(x), i32(m), i32(k)]
    c.launch("split_rows_bf16", grid, SPLIT_THREADS, args, why="activations of an FP8 GEMM")
    return codes, scales
