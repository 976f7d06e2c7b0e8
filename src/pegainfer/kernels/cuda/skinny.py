"""Products of up to 64 rows on Hopper (sm90/gemm/skinny.cuh): the weight's shares, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.launch import Arg, f32, i32, ptr, struct
from pegainfer.runtime.cuda.tma import TensorMap

TOKENS = (8, 16, 32, 64)  # that kernels are compiled for
MAX_TOKENS, BOX = 64, 64  # as in skinny.cuh; BOX: elements of k, 128 bytes
THREADS, MAX_BLOCKS = 256, 3  # MAX_BLOCKS: of 64 rows in a tile
SYSTEM = 1 << 10  # bytes of shared memory a block that the system takes
KINDS = {"store": 0, "storef32": 1, "residual": 2, "swiglu": 3}


@dataclass(frozen=True)
class SkinnyChoice:
    """A launch of sm90/gemm/skinny.cuh."""

    kernel: str
    tokens: int  # rows of x that a block holds
    groups: int  # of blocks; each takes every groups-th tile
    rows: int  # of w in a tile
    splits: int  # of k
    multicast: int  # blocks that share one copy of x
    wide: int  # 64-element columns of a stage
    depth_w: int
    depth_x: int
    trigger: int  # stages before the end at which the next launch may start
    sums: int  # offset of a tile's sums in shared memory
    shared: int  # bytes
    why: str = ""

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.groups * self.splits, 1, 1)

    @property
    def cluster(self) -> int:
        return self.splits * self.multicast if self.splits * self.multicast > 1 else 0

    def square_groups(self, n: int) -> int:
        """How many sums of squares a row of `n` outputs leaves."""
        return -(-n // self.rows) * -(-self.rows // 16)

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.groups} groups x {self.splits} splits of {self.rows} rows, "
            f"{self.depth_w} + {self.depth_x} stages of {BOX * self.wide}, {self.shared} B ({self.why})"
        )


def skinny_choice(
    dtype: str,
    m: int,
    n: int,
    k: int,
    info: DeviceInfo,
    *,
    rows: int,
    splits: int = 1,
    multicast: int = 1,
    wide: int = 1,
    depth_x: int = 4,
    depth_w: int = 0,
    trigger: int | None = None,
    per_sm: int = 2,
    why: str = "",
) -> SkinnyChoice | None:
    """That launch with the deepest ring that fits, or None where it does not fit."""
    tokens = next((t for t in TOKENS if m <= t), 0)
    blocks = -(-rows // 64)
    tiles, chunks = -(-n // rows), -(-k // (BOX * wide))
    if not tokens or blocks > MAX_BLOCKS or splits > chunks or (splits > 1 and multicast > 1):
        return None
    if multicast > 1 and tokens // multicast < 8:
        return None
    groups = tiles if splits > 1 else min(tiles, info.num_sms)
    groups = -(-groups // multicast) * multicast
    room = min(info.shared_per_sm // per_sm - SYSTEM, info.max_shared)
    stage_w, stage_x = rows * 128 * wide, tokens * 128 * wide
    fragments = -(-rows // 16) * (tokens // 8)
    sums = -(-fragments // splits) * splits * 512
    # Sums lie in the rings at the end, unless they come from other blocks, or the next tile is on its way.
    for own in (0, sums):
        rest = room - own - 4 * tokens - 16 - depth_x * (stage_x + 16)
        depth = min(depth_w or 32, rest // (stage_w + 16))
        rings = depth * stage_w + depth_x * stage_x
        if depth >= 2 and (own or (tiles <= groups and splits == 1 and rings >= sums)):
            break
    else:
        return None
    barriers = rings + 16 * (depth + depth_x) + 16 + 4 * tokens
    # wgmma takes 64 rows even of a smaller tile; what it reads past the last stage must be there.
    shared = max(barriers + own, depth * stage_w + (blocks * 64 - rows) * 128)
    return SkinnyChoice(
        f"skinny_{dtype}_{tokens}_{blocks}", tokens, groups, rows, splits, multicast, wide, depth, depth_x,
        depth if trigger is None else trigger, barriers if own else 0, shared, why,
    )  # fmt: skip


def skinny_args(
    c: SkinnyChoice,
    kind: str,
    sizes: tuple[int, int, int],
    maps: tuple[TensorMap, TensorMap],
    out: int,
    ld_out: int,
    *,
    squares: int = 0,
    square_groups: int = 0,
    norm: int = 0,
    normed: int = 0,
    next_squares: int = 0,
    eps: float = 0.0,
) -> list[Arg]:
    """The kernel's arguments; see skinny::Args."""
    m, n, k = sizes
    numbers = (
        m, n, k, ld_out, KINDS[kind], -(-n // c.rows), c.groups, c.rows, -(-k // (BOX * c.wide)), c.splits,
        c.multicast, c.wide, c.depth_w, c.depth_x, c.trigger, square_groups, c.sums,
    )  # fmt: skip
    args = struct(
        ptr(out), ptr(squares), ptr(norm), ptr(normed), ptr(next_squares), *map(i32, numbers), f32(eps)
    )
    return [maps[0].arg(), maps[1].arg(), args]
