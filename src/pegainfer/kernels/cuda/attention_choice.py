"""Paged attention: problem and choice. Which kernels run for it, and how much room their work lists need."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.kernels.cuda.gemm import SIXTEEN
from pegainfer.kernels.cuda.pointwise import HEADS
from pegainfer.kernels.cuda.site import blocks
from pegainfer.runtime.cuda.device import DeviceInfo

# As in common/attention/attention.cuh.
DECODE_CHUNK, DECODE_PARTS, PREFILL_PARTS, ITEM_BYTES, PLAN_BYTES, CUT_BYTES = 128, 32, 16, 32, 16, 16
PAGE = 16  # tokens that a decoding warp takes at a time; a block is whole pages
TILE_HEADS = (64, 128)  # that sm90/attention/prefill.cuh is compiled for
PREFILL_SLOTS = 128  # parts of prefilled tiles that may wait for each other in a step
# Up to so many rows are cut by their own length: products of as many are the same bit by bit whoever shares
# the batch, and so is attention. More are cut into even shares (adr/0010).
OWN_PARTS_ROWS = 16
# On Hopper a step's only row goes to one block on every SM, which add up their own parts (adr/0012), where it
# has so few units: in clusters of eight blocks, one unit each, up to so many keys, beyond that all over.
CLUSTER, ROW_UNITS, ROW_CLUSTER_KEYS = 8, 8, 6144
# On Hopper decoding appends the token itself in steps of up to so many rows, and where they are cut into even
# shares. In between a block gets two or three parts, and which SMs hold those depends on where the product
# ahead left room: 16 rows took 4.66 ms a step against 4.28 (docs/log.md).
APPEND_ROWS, APPEND_SHARED_ROWS = 8, 128  # above, the product ahead is cuBLASLt's and nothing starts early


@dataclass(frozen=True)
class AttentionProblem:
    """One layer's attention in a step of given greatest sizes."""

    tokens: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    table_width: int  # blocks a row
    dtype: str
    decode_only: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def units(self) -> int:
        """Blocks that decode the same keys: each one KV head, and at most eight of its query heads."""
        return self.kv_heads * blocks(self.group, 8)


@dataclass(frozen=True)
class AttentionChoice:
    """Kernels and room for a problem. `decode_slots`, `prefill_slots`: parts whose sums are kept."""

    decode: str
    prefill: str  # '' if no row can have several query tokens
    tile_rows: int  # (token, head) pairs of a prefill tile
    decode_items: int
    prefill_items: int
    decode_slots: int
    prefill_slots: int
    shares: int  # groups of blocks that decode even shares of all keys; 0: rows are cut by their own length
    row: bool  # whether the only row is shared out to all SMs; else a launch of its own adds up the parts
    append: bool  # whether decoding finishes the projected heads and appends the token

    @property
    def boxes(self) -> bool:
        """Whether prefill reads the cache through the tensor memory accelerator."""
        return "_tiles_" in self.prefill

    def __str__(self) -> str:
        prefill = f", {self.prefill} in tiles of {self.tile_rows}" if self.prefill else ""
        parts = f"{self.shares} even shares" if self.shares else f"parts of {DECODE_CHUNK} keys or more"
        parts = "one block an SM" if self.row else parts
        append = ", norm, rotation and append inside" if self.append else ""
        return f"{self.decode} in {parts}{append}{prefill}"


def choose_attention(
    p: AttentionProblem, info: DeviceInfo, decode_per_sm: int = 1, append: bool = False
) -> AttentionChoice:
    """This GPU's tensor core kernels for 16-bit caches (`refusal` must be None).

    Args:
        decode_per_sm: blocks of the decoding kernel that fit an SM together.
        append: q, k and v are as their projection left them (`may_append` must be true).
    """
    longest = p.table_width * p.block_size
    shares = decode_per_sm * info.num_sms // p.units if p.rows > OWN_PARTS_ROWS else 0
    row = takes_row(p, info)
    items, slots = _decode_room(p, shares, longest)
    tile_rows = 64 if p.head_dim == 256 else 128
    tiles_kernel = info.arch == "90a" and p.head_dim in TILE_HEADS
    prefill = "attention_prefill_tiles" if tiles_kernel else "attention_prefill"
    tiles = blocks(p.tokens * p.group, tile_rows) + p.rows
    return AttentionChoice(
        decode_kernel(p, row, append),
        "" if p.decode_only else f"{prefill}_{p.dtype}_d{p.head_dim}",
        tile_rows,
        items,
        0 if p.decode_only else tiles * PREFILL_PARTS,
        0 if row else slots,
        0 if p.decode_only else PREFILL_SLOTS,
        shares,
        row,
        append,
    )


def takes_row(p: AttentionProblem, info: DeviceInfo) -> bool:
    """Whether the step's only row is shared out to all SMs."""
    return info.arch == "90a" and p.rows == 1 and p.units <= ROW_UNITS


def may_append(p: AttentionProblem, info: DeviceInfo) -> bool:
    """Whether decoding can finish the projected heads of the step's tokens, each a row's only one."""
    if p.dtype not in SIXTEEN or refusal(p) is not None:
        return False
    few = p.rows <= APPEND_ROWS or OWN_PARTS_ROWS < p.rows <= APPEND_SHARED_ROWS
    return info.arch == "90a" and p.decode_only and p.tokens <= p.rows and few


def _decode_room(p: AttentionProblem, shares: int, longest: int) -> tuple[int, int]:
    """(items, parts whose sums are kept) of rows of up to `longest` keys."""
    if shares:
        return p.rows + shares, 2 * shares  # each end of a share cuts one row in two at the most
    parts = min(DECODE_PARTS, max(1, blocks(longest, DECODE_CHUNK)))
    return p.rows * parts, p.rows * parts if parts > 1 else 0


def decode_kernel(p: AttentionProblem, row: bool = False, append: bool = False) -> str:
    kind = f"{'append_' if append else ''}{'row_' if row else ''}"
    return f"attention_decode_{kind}{p.dtype}_d{p.head_dim}"


def refusal(p: AttentionProblem) -> tuple[str, str] | None:
    """(required, offered) where no kernel serves the problem."""
    if p.dtype not in (*SIXTEEN, "f32"):
        return "a cache of bf16, f16 or f32", p.dtype
    if p.dtype in SIXTEEN and p.head_dim not in HEADS:
        return f"heads of {', '.join(map(str, HEADS))}", str(p.head_dim)
    if p.head_dim > 256:
        return "heads of at most 256", str(p.head_dim)
    if p.block_size % PAGE:
        return f"blocks of a multiple of {PAGE} tokens", str(p.block_size)
    return None
