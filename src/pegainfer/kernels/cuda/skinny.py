"""Products of up to 64 rows on Hopper (sm90/gemm/skinny.cuh): how the weight is shared out, and the launch."""

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
    room = min(info.shared_per_sm // per_sm - SYSTEM, info.max_shared)
    stage_w, stage_x = rows * 128 * wide, tokens * 128 * wide
    fixed = depth_x * (stage_x + 16) + 4 * tokens
    depth = min(depth_w or 32, (room - fixed) // (stage_w + 16))
    if depth < 2:
        return None
    rings = depth * stage_w + depth_x * stage_x
    if splits > 1 and rings < blocks * 64 * tokens * 4:  # where the sums of a split lie at the end
        return None
    # wgmma takes 64 rows even of a smaller tile; what it reads past the last stage must be there.
    past = depth * stage_w + (blocks * 64 - rows) * 128
    shared = max(fixed + depth * (stage_w + 16), past)
    if shared > room:
        return None
    groups = tiles if splits > 1 else min(tiles, info.num_sms * per_sm // 2)
    groups = -(-groups // multicast) * multicast
    return SkinnyChoice(
        f"skinny_{dtype}_{tokens}_{blocks}", tokens, groups, rows, splits, multicast, wide, depth, depth_x,
        depth if trigger is None else trigger, shared, why,
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
        m, n, k, ld_out, KINDS[kind], c.rows, c.splits, c.multicast, c.wide, c.depth_w, c.depth_x, c.trigger,
        square_groups,
    )  # fmt: skip
    args = struct(
        ptr(out), ptr(squares), ptr(norm), ptr(normed), ptr(next_squares), *map(i32, numbers), f32(eps)
    )
    return [maps[0].arg(), maps[1].arg(), args]
