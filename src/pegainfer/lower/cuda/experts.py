"""GEMMs of slots with the matrices of their experts: which kernel, and its launches.

A slot is one of a token's K places for an expert. Counts of slots an expert stay on the device. Grids depend
on sizes alone, and blocks without work end at once, so that a step is one graph for its sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.lower.cuda.gemm import row_threads
from pegainfer.lower.cuda.lowering import LoweringContext, blocks
from pegainfer.lower.cuda.plan import Boxes, Place, Struct, struct
from pegainfer.lower.cuda.target import SYSTEM
from pegainfer.runtime.cuda.arguments import (
    EXPERT_GROUPS,
    EXPERT_STREAM,
    EXPERTS,
    SORT_SLOTS,
    SPREAD_ROWS,
    SUM_EXPERTS,
)
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.tensor import item_bytes

# common/moe/stream.cuh
STREAM_TOKENS, STREAM_SLOTS, PART = 32, 512, 8  # the most that it is chosen for; slots of an entry
STREAM_THREADS = 256
RING_BYTES, PARTIAL_BYTES = 8 * 3072, 2 * 8 * 16 * 8 * 4  # of a stage of all warps; of their sums
LEAST_DEPTH, MOST_DEPTH = 3, 6
# sm90/moe/grouped.cuh
GROUP_PRODUCERS, BOX, MOST_STAGES = 128, 64, 12
COLUMNS, FEW_COLUMNS = 256, 128  # rows of a matrix in a tile, and in one where there are few tiles
WAVES = 4  # of tiles, from which on the larger ones leave no SM idle for long
# Slots of a block by the slots an expert in the mean, up to which it is chosen: few blocks are full, so that
# an expert's weights are seldom read twice, and what is read of x stays small beside the weights.
TILES = ((2, 8), (4, 16), (12, 32), (64, 64))
MOST_TILE = 128
# common/moe/experts.cuh
ROW_WARPS = 8
TILE_N, TILE_SLOTS, TILE_THREADS = 64, 64, 128
TILE_SHARED = 3 * (TILE_N + TILE_SLOTS) * 128  # bytes: STAGES · STAGE_BYTES
SORT_THREADS = 1024
MOST_EXPERTS = 8192  # whose counts fit into 48 KiB of shared memory, with some of it for the scan


@dataclass(frozen=True)
class Slots:
    """The slots of a call, and where their experts and the weights of their results lie.

    Args:
        gates: None where results are not added up.
    """

    tokens: int
    chosen: int
    num_experts: int
    experts: Place
    gates: Place | None = None

    @property
    def count(self) -> int:
        return self.tokens * self.chosen


@dataclass(frozen=True)
class ExpertChoice:
    """The kernels of a call's GEMMs.

    Args:
        kind: 'stream' (a few slots), 'groups' (wgmma), 'tiles' (mma.sync) or 'rows' (a warp an output).
        tile: most slots of an entry of the sorted list; 0 where no list is needed.
    """

    kind: str
    tile: int
    dtype: str
    why: str

    def most_blocks(self, slots: Slots) -> int:
        """Entries that the experts can need, however the slots are spread."""
        return min(slots.count, slots.num_experts) + slots.count // self.tile


def choose_experts_kernel(
    tokens: int, chosen: int, num_experts: int, m: int, f: int, dtype: str, info: DeviceInfo
) -> ExpertChoice:
    """The kernels for so many tokens. m, f: widths of the residual stream and of an expert."""
    slots = tokens * chosen
    if dtype != "bf16" or m % 8 or f % 8:
        return ExpertChoice("rows", 0, dtype, f"no other kernel takes {dtype} of widths {m} and {f}")
    hopper = info.capability == (9, 0)
    # With tiles for half of the SMs the grouped GEMM is faster, for one token too.
    fills = hopper and 2 * min(slots, num_experts) * blocks(2 * f, FEW_COLUMNS) >= info.num_sms
    if tokens <= STREAM_TOKENS and slots <= STREAM_SLOTS and not fills:
        return ExpertChoice("stream", PART, dtype, f"{slots} slots: the chosen matrices are streamed")
    if hopper:
        tile = next((tile for mean, tile in TILES if slots <= mean * num_experts), MOST_TILE)
        return ExpertChoice("groups", tile, dtype, f"{slots} slots in blocks of {tile} on wgmma")
    return ExpertChoice("tiles", TILE_SLOTS, dtype, f"{slots} slots in blocks of {TILE_SLOTS}")


@dataclass(frozen=True)
class Lists:
    """The slots sorted by expert. `early`: they were made before the launch ahead of their next reader."""

    order: Place
    places: Place
    blocks: Place
    in_use: Place
    early: bool = False


def lists(c: LoweringContext, choice: ExpertChoice, slots: Slots, *, early: bool = False) -> Lists:
    """Room for the sorted lists of a call."""
    order, places = c.scratch(4 * slots.count), c.scratch(4 * slots.count)
    return Lists(order, places, c.scratch(16 * choice.most_blocks(slots)), c.scratch(4), early)


def sort_args(
    made: Lists, choice: ExpertChoice, slots: Slots, zeroed: Place | None, row_bytes: int
) -> Struct:
    """slots::SortArgs; see `sort`."""
    return struct(
        SORT_SLOTS, order=made.order, places=made.places, blocks=made.blocks, in_use=made.in_use,
        experts=slots.experts, zeroed=zeroed, slots=slots.count, num_experts=slots.num_experts,
        row_bytes=row_bytes, tile=choice.tile,
    )  # fmt: skip


def sort(
    c: LoweringContext, choice: ExpertChoice, slots: Slots, zeroed: Place | None = None, row_bytes: int = 0
) -> Lists:
    """Sorts the slots by expert in a launch of its own.

    Args:
        zeroed: [slots, row_bytes], of which the rows of slots without expert become zeros.
    """
    if slots.num_experts > MOST_EXPERTS:
        raise c.refuse("experts", f"at most {MOST_EXPERTS}", slots.num_experts)
    made = lists(c, choice, slots)
    args = sort_args(made, choice, slots, zeroed, row_bytes)
    c.launch("sort_slots", (1, 1, 1), SORT_THREADS, [args], 4 * slots.num_experts)
    return made


def spread(c: LoweringContext, slots: Slots, made: Lists, x: Place, width: int, each: int) -> Place:
    """Rows of x as the slots lie when sorted. each: slots that share a row. Returns [slots, width]."""
    to = c.scratch(2 * slots.count * width)
    args = struct(SPREAD_ROWS, out=to, x=x, places=made.places, each=each, m=width)
    c.launch("spread_rows_16", (slots.count // each, 1, 1), row_threads(width, 8), [args])
    return to


def stream(
    c: LoweringContext,
    choice: ExpertChoice,
    slots: Slots,
    made: Lists,
    x: Place,
    w: Place,
    n: int,
    k: int,
    *,
    out: Place | None = None,
    residual: Place | None = None,
) -> None:
    """GEMMs of a few slots. Without gates, SwiGLU of gate and up rows goes to `out`. With gates, each token's
    weighted sum goes to `out` or is added to `residual`.
    """
    info, most, sums = c.target.info, choice.most_blocks(slots), slots.gates is not None
    held = PARTIAL_BYTES + 16 * most + 8 * slots.count
    if sums:
        held += 4 * slots.tokens * blocks(n, info.num_sms)
    for per_sm in (2, 1):  # two launches share an SM where its memory allows it
        room = min(info.shared_per_sm // per_sm - SYSTEM, info.max_shared)
        depth = min(MOST_DEPTH, (room - held) // RING_BYTES)
        if depth >= LEAST_DEPTH:
            break
    if depth < 1:
        raise c.refuse("shared memory", f"at least {held + RING_BYTES} bytes", room)
    args = struct(
        EXPERT_STREAM, out=out, residual=residual, x=x, w=w, gates=slots.gates, order=made.order,
        blocks=made.blocks, in_use=made.in_use, slots=slots.count, most=most, tokens=slots.tokens,
        chosen=slots.chosen, n=n, k=k, depth=depth, early=int(made.early and sums),
    )  # fmt: skip
    why = f"{choice.why} through {depth} stages"
    kernel = f"expert_stream_{choice.dtype}_{'sum' if sums else 'swiglu'}"
    c.launch(kernel, (info.num_sms, 1, 1), STREAM_THREADS, [args], depth * RING_BYTES + held, why=why)


def groups(
    c: LoweringContext,
    choice: ExpertChoice,
    slots: Slots,
    made: Lists,
    x: Place,
    w: Place,
    n: int,
    k: int,
    out: Place,
    kind: str,
    order: Place | None = None,
) -> None:
    """The grouped GEMM of sorted rows x. order: rows of `out`; None leaves them sorted."""
    info, warpgroups = c.target.info, blocks(choice.tile, 64)
    few = min(slots.count, slots.num_experts) * blocks(n, COLUMNS) < WAVES * info.num_sms
    columns = FEW_COLUMNS if few and warpgroups == 1 else COLUMNS
    stage = (choice.tile + columns) * 128
    depth = min(MOST_STAGES, info.max_shared // (stage + 16))
    boxes = (
        Boxes(w, (slots.num_experts * n, k), (2 * k,), choice.dtype, (columns, BOX), promotion=256),
        Boxes(x, (slots.count, k), (2 * k,), choice.dtype, (choice.tile, BOX), promotion=256),
    )
    tiles = blocks(n, columns)
    args = struct(
        EXPERT_GROUPS, out=out, order=order, blocks=made.blocks, in_use=made.in_use, n=n, k=k, tiles=tiles,
        tile=choice.tile, depth=depth,
    )  # fmt: skip
    grid = min(info.num_sms, choice.most_blocks(slots) * tiles)
    threads = 128 * warpgroups + GROUP_PRODUCERS
    kernel = f"expert_groups_{choice.dtype}_{64 * warpgroups}_{columns}_{kind}"
    why = f"{choice.why} through {depth} stages"
    c.launch(kernel, (grid, 1, 1), threads, [*boxes, args], depth * (stage + 16), why=why)


def tiles(
    c: LoweringContext,
    choice: ExpertChoice,
    slots: Slots,
    made: Lists | None,
    x: Place,
    w: Place,
    n: int,
    k: int,
    out: Place,
    kind: str,
    each: int,
) -> None:
    """GEMMs by mma.sync, or without tensor cores where `choice` says so. each: slots that share a row."""
    found = {"order": made.order, "blocks": made.blocks, "in_use": made.in_use} if made else {}
    args = struct(
        EXPERTS, out=out, x=x, experts=slots.experts, w=w,
        **{"order": None, "blocks": None, "in_use": None, **found},
        slots=slots.count, num_experts=slots.num_experts, n=n, k=k, each=each,
    )  # fmt: skip
    if choice.kind == "tiles":
        grid = (blocks(n, TILE_N), choice.most_blocks(slots), 1)
        name = f"expert_tiles_{choice.dtype}_{kind}"
        c.launch(name, grid, TILE_THREADS, [args], TILE_SHARED, why=choice.why)
        return
    outputs = n // 2 if kind == "swiglu" else n
    grid = (slots.count, blocks(outputs, ROW_WARPS), 1)
    suffix = "" if choice.dtype == "f32" and k % 4 == 0 else "_any"
    c.launch(f"expert_rows_{choice.dtype}_{kind}{suffix}", grid, 32 * ROW_WARPS, [args], why=choice.why)


def add_up(
    c: LoweringContext,
    slots: Slots,
    results: Place,
    places: Place | None,
    m: int,
    dtype: str,
    out: Place | None,
    residual: Place | None,
) -> None:
    """Each token's weighted sum of results [slots, m], in the order of its slots.

    places: rows of `results`, None where each slot has its own.
    """
    each = 16 // item_bytes(dtype)
    suffix, width = ("", each) if m % each == 0 else ("_any", 1)
    args = struct(
        SUM_EXPERTS, out=out, residual=residual, results=results, places=places, experts=slots.experts,
        gates=slots.gates, num_experts=slots.num_experts, k=slots.chosen, m=m,
    )  # fmt: skip
    threads = min(256, row_threads(m, width))
    grid = (slots.tokens, blocks(blocks(m, width), threads), 1)
    c.launch(f"sum_experts_{dtype}{suffix}", grid, threads, [args], why="a token's sum in a fixed order")
