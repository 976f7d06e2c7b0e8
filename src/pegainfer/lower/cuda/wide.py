"""GEMMs of 65 to 256 rows on Hopper (sm90/gemm/wide.cuh): the weight's shares."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.lower.cuda.skinny import BOX, MAX_TOKENS, NEVER_MEASURED, SkinnyChoice, even_shares
from pegainfer.lower.cuda.target import SYSTEM, Target
from pegainfer.runtime.cuda.device import DeviceInfo

TOKENS, ROWS = (128, 256), (64, 88, 96, 152)  # that kernels are compiled for
UNIT = 4 * (512 + 16)  # bytes of the sums of 16 tokens by 32 rows
PRODUCERS = 128  # threads that do not multiply
# The next launch, where it fits beside this one, may start when the stages still to be copied are this many
# fewer than a ring holds. If it started earlier, its copies would delay those of this launch.
LATER = 2


@dataclass(frozen=True)
class Cut:
    """How a weight is shared out; see SkinnyChoice. `depth_x`: for all tokens of a kernel; more of fewer."""

    rows: int
    splits: int = 1
    depth_x: int = 3


def cut(m: int, n: int, k: int, target: Target) -> tuple[Cut | None, str]:
    """The fastest measured shares, else the fewest splits of k whose even shares have enough rows; and the
    reason. None where the library is faster.
    """
    tuned = target.tuning.find(target.info, "wide", m, n=n, k=k)
    if tuned is not None:
        measured = f"measured on {tuned.card} up to {tuned.most} rows"
        if tuned.numbers is None:
            return None, f"the library was quicker, {measured}"
        return Cut(**tuned.numbers), measured
    rows, splits = even_shares(n, k, target.info)
    if rows > ROWS[-1]:
        return None, f"a block would have {rows} of the weight's rows, and kernels take {ROWS[-1]}"
    if m > TOKENS[0] and splits > 1:
        # No other launch overlaps with such a one, and the library is faster than adding up splits.
        return None, f"the library is quicker than {splits} splits of k on all of an SM"
    return Cut(rows, splits, 2 if rows > 128 and m <= TOKENS[0] else 3), NEVER_MEASURED


def choose_wide(dtype: str, m: int, n: int, k: int, kind: str, target: Target) -> SkinnyChoice | str | None:
    """The launch for a problem, the reason why the library is quicker, or None where no kernel serves it."""
    if target.info.capability != (9, 0) or not MAX_TOKENS < m <= TOKENS[-1] or n % 8 or k % 8:
        return None
    c, why = cut(m, n, k, target)
    if c is None:
        return why
    return wide_choice(
        dtype, m, n, k, target.info, rows=c.rows, splits=c.splits, depth_x=c.depth_x,
        residual=kind == "residual", why=f"{m} rows; {why}",
    )  # fmt: skip


def wide_choice(
    dtype: str,
    m: int,
    n: int,
    k: int,
    info: DeviceInfo,
    *,
    rows: int,
    splits: int = 1,
    depth_x: int = 3,
    residual: bool = False,
    later: int = LATER,
    why: str = "",
) -> SkinnyChoice | None:
    """That launch with the deepest ring of the weight that fits, or None where it does not fit."""
    most = next((t for t in TOKENS if m <= t), 0)
    columns = next((r for r in ROWS if rows <= r), 0)
    tiles = -(-n // rows)
    if not most or not columns or splits > -(-k // BOX) or (splits == 1 and tiles > info.num_sms):
        return None
    room = min(info.shared_per_sm // (2 if most == TOKENS[0] else 1) - SYSTEM, info.max_shared)
    tokens = -(-m // 8) * 8
    stage_w, stage_x, depth_x = rows * 128, tokens * 128, depth_x * most // tokens
    slots = -(-(-(-rows // 32) * (most // 16)) // splits)
    extra = 16 + 4 * most + (slots * 1024 + -(-rows // 32) * 128 if residual else 0)
    # wgmma reads all of the kernel's rows and tokens even from smaller stages, so memory must extend past the
    # end of either ring. x's ring comes first.
    past_w, past_x = (columns - rows) * 128, (most - tokens) * 128
    depth = min(32, (room - max(extra, past_w) - depth_x * (stage_x + 16)) // (stage_w + 16))
    rings = depth * stage_w + depth_x * stage_x
    if depth < 2 or rings < slots * splits * UNIT:  # sums lie in the rings at the end
        return None
    barriers = rings + 16 * (depth + depth_x) + 16 + 4 * most
    shared = max(rings + 16 * (depth + depth_x) + extra, rings + past_w, depth_x * stage_x + past_x)
    return SkinnyChoice(
        f"wide_{dtype}_{most}_{columns}", tokens, tiles, rows, splits, 1, depth, depth_x,
        max(1, depth - later), 0, barriers, shared, why, most + PRODUCERS,
    )  # fmt: skip
