"""Lowering of a mixture of experts: routing, products with the chosen experts' matrices, weighted sums.

Counts of tokens an expert stay on the device. Grids are made for the most blocks that a number of tokens can
need, and blocks without work end at once, so that a step is one graph for its sizes.
"""

from __future__ import annotations

from pegainfer.lower.cuda.gemm import SIXTEEN
from pegainfer.lower.cuda.lowering import LoweringContext, blocks, handles
from pegainfer.lower.cuda.plan import Place, ptr, struct
from pegainfer.runtime.cuda.arguments import EXPERTS, ROUTE_EXPERTS, SORT_SLOTS, SUM_EXPERTS
from pegainfer.runtime.cuda.launch import i64
from pegainfer.runtime.cuda.tensor import item_bytes

ROUTE_WARPS, MOST_CHOSEN = 4, 32  # WARPS of route.cu, and one choice a lane
ROW_WARPS = 8  # as in experts.cuh
TILE_N, TILE_SLOTS, TILE_THREADS = 64, 64, 128
TILE_SHARED = 3 * (TILE_N + TILE_SLOTS) * 128  # bytes: STAGES · STAGE_BYTES
SORT_THREADS = 1024
LISTS = ("order", "blocks", "in_use")  # members of SORT_SLOTS and EXPERTS
MOST_EXPERTS = 2048  # whose counts and ranks fit into 48 KiB of shared memory
# Slots up to which each output gets a warp: experts are seldom shared then, and a tile would be mostly empty.
ROW_SLOTS = 32


@handles("route_experts")
def _route_experts(c: LoweringContext) -> None:
    s, attrs = c.sizes, c.call.attrs
    if s["K"] > MOST_CHOSEN:
        raise c.refuse("experts of a token", f"at most {MOST_CHOSEN}", s["K"])
    most = 48 * 1024 // (12 * ROUTE_WARPS)
    if s["N"] > most:
        raise c.refuse("experts", f"at most {most}", s["N"])
    groups, kept = int(attrs["groups"]), int(attrs["kept_groups"])
    if s["N"] % groups or not 0 < kept <= groups or s["K"] > kept * (s["N"] // groups):
        raise c.refuse("groups", f"divisors of {s['N']} with {s['K']} experts in those kept", (groups, kept))
    args = struct(
        ROUTE_EXPERTS, experts=c.address("experts"), gates=c.address("gates"), logits=c.address("logits"),
        bias=c.vector("bias"), tokens=s["T"], n=s["N"], k=s["K"], sigmoid=int(attrs["sigmoid"]),
        renormalize=int(attrs["renormalize"]), groups=groups, kept_groups=kept, scale=float(attrs["scale"]),
    )  # fmt: skip
    grid = (blocks(s["T"], ROUTE_WARPS), 1, 1)
    c.launch("route_experts", grid, 32 * ROUTE_WARPS, [args], 12 * ROUTE_WARPS * s["N"])


@handles("expert_gate_up")
def _expert_gate_up(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("h")
    if c.dtype("act") != dtype:
        raise c.refuse("dtype of act", dtype, c.dtype("act"))
    w = c.matrix("w_gate", "w_up", dtype=dtype, layout="pairs")
    _products(c, c.address("act"), c.address("h"), w, 2 * s["F"], s["M"], s["K"], dtype, "swiglu")


@handles("expert_down")
def _expert_down(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("act")
    slots = s["T"] * s["K"]
    results = c.scratch(slots * s["M"] * item_bytes(dtype))
    _products(
        c, results, c.address("act"), c.matrix("w_down", dtype=dtype), s["M"], s["F"], 1, dtype, "store"
    )
    args = struct(
        SUM_EXPERTS, out=c.address("out"), results=results, experts=c.address("experts"),
        gates=c.address("gates"), num_experts=s["N"], k=s["K"], m=s["M"],
    )  # fmt: skip
    c.launch(f"sum_experts_{dtype}", (s["T"], blocks(s["M"], 256), 1), 256, [args])


def _products(
    c: LoweringContext, out: Place, x: Place, w: Place, n: int, k: int, each: int, dtype: str, kind: str
) -> None:
    """Adds the products of all slots.

    Args:
        n, k: sizes of an expert's matrix.
        each: slots that share a row of x.
        kind: 'swiglu' or 'store', as in experts.cuh.
    """
    s = c.sizes
    slots = s["T"] * s["K"]
    if not slots:
        return
    width = 16 // item_bytes(dtype)
    tiled = slots > ROW_SLOTS and dtype in SIXTEEN and k % width == 0
    lists = dict.fromkeys(LISTS)
    most = most_blocks(slots, s["N"])
    if tiled:
        lists = _sort(c, slots, most, out if kind == "swiglu" else None, n // 2 * item_bytes(dtype))
    args = struct(
        EXPERTS, out=out, x=x, experts=c.address("experts"), w=w, **lists, slots=slots, num_experts=s["N"],
        n=n, k=k, each=each,
    )  # fmt: skip
    if tiled:
        grid, why = (blocks(n, TILE_N), most, 1), f"{slots} slots in at most {most} blocks of {TILE_SLOTS}"
        c.launch(f"expert_tiles_{dtype}_{kind}", grid, TILE_THREADS, [args], TILE_SHARED, why=why)
        return
    outputs = n // 2 if kind == "swiglu" else n
    suffix = "" if k % width == 0 else "_any"
    why = f"{slots} slots: a warp an output" if slots <= ROW_SLOTS else "no tiles for this dtype or width"
    grid = (slots, blocks(outputs, ROW_WARPS), 1)
    c.launch(f"expert_rows_{dtype}_{kind}{suffix}", grid, 32 * ROW_WARPS, [args], why=why)


def _sort(
    c: LoweringContext, slots: int, most: int, zeroed: Place | None, row_bytes: int
) -> dict[str, Place | None]:
    """Sorts the slots by expert. Returns where LISTS are.

    Args:
        zeroed: [slots, row_bytes], of which the rows of slots without expert become zeros.
    """
    num_experts = c.sizes["N"]
    if num_experts > MOST_EXPERTS:
        raise c.refuse("experts", f"at most {MOST_EXPERTS}", num_experts)
    sizes = (4 * slots, 16 * most, 4)
    lists: dict[str, Place | None] = dict(zip(LISTS, map(c.scratch, sizes), strict=True))
    args = struct(
        SORT_SLOTS, **lists, experts=c.address("experts"), zeroed=zeroed, slots=slots,
        num_experts=num_experts, row_bytes=row_bytes,
    )  # fmt: skip
    c.launch("sort_slots", (1, 1, 1), SORT_THREADS, [args], 4 * (2 * num_experts + 1))
    return lists


def most_blocks(slots: int, experts: int) -> int:
    """Blocks of TILE_SLOTS slots that the experts can need, however the slots are spread."""
    return min(slots, experts) + slots // TILE_SLOTS


@handles("reduce_residual")
def _reduce_residual(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("x")
    count = s["T"] * s["N"]
    grid = min(blocks(count, 256), 8 * c.target.info.num_sms)
    args = [ptr(c.address("x")), ptr(c.address("partial")), i64(count)]
    c.launch(f"reduce_residual_{dtype}", (grid, 1, 1), 256, args)
