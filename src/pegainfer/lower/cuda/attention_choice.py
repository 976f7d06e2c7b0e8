"""Paged attention: problem and choice. Which kernels run for it, and how much room their work lists need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pegainfer.lower.cuda.gemm import SIXTEEN
from pegainfer.lower.cuda.lowering import blocks
from pegainfer.lower.cuda.pointwise import HEADS
from pegainfer.lower.cuda.target import Target
from pegainfer.ops.float8 import E4M3

# As in common/attention/attention.cuh.
DECODE_CHUNK, DECODE_PARTS, PREFILL_PARTS, ITEM_BYTES, PLAN_BYTES, CUT_BYTES = 128, 32, 16, 32, 16, 16
PAGE = 16  # tokens that a decoding warp takes at a time; a block is whole pages
TILE_HEADS = (64, 128, 256)  # that sm90/attention/prefill.cuh is compiled for
PREFILL_SLOTS = 128  # parts of prefilled tiles that may wait for each other in a step
# Up to this many rows are split by their own length, so a row's attention has the same bits whatever other
# rows share its batch, as its GEMMs have. More rows are split into even shares (adr/0010).
OWN_PARTS_ROWS = 16


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
    def activation(self) -> str:
        """The dtype of queries and outputs."""
        return "bf16" if self.dtype == E4M3 else self.dtype

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
        """Whether prefill reads the cache by TMA."""
        return "_tiles_" in self.prefill

    @property
    def cut(self) -> str:
        """How decoded rows are cut."""
        parts = f"{self.shares} even shares" if self.shares else f"parts of {DECODE_CHUNK} keys or more"
        parts = "one block an SM" if self.row else parts
        return parts + (", norm, rotation and append inside" if self.append else "")

    def __str__(self) -> str:
        prefill = f", {self.prefill} in tiles of {self.tile_rows}" if self.prefill else ""
        return f"{self.decode} in {self.cut}{prefill}"


@lru_cache(maxsize=1024)
def choose_attention(p: AttentionProblem, target: Target, append: bool = False) -> AttentionChoice:
    """This GPU's tensor core kernels for caches of 16 or 8 bits (`refusal` must be None).

    Args:
        append: q, k and v are as their projection left them (`may_append` must be true).
    """
    info = target.info
    longest = p.table_width * p.block_size
    per_sm = fit_sm(p, target, decode_kernel(p, append=append))
    shares = per_sm * info.num_sms // p.units if p.rows > OWN_PARTS_ROWS else 0
    row = takes_row(p, target)
    items, slots = decode_room(p, shares, longest)
    tiles_kernel = info.arch == "90a" and p.head_dim in TILE_HEADS and p.dtype in SIXTEEN
    tile_rows = 64 if p.head_dim == 256 and not tiles_kernel else 128
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


def block_of(p: AttentionProblem, target: Target, kernel: str) -> tuple[int, int]:
    """(threads, bytes of shared memory) of a block, as the kernel's source declares them."""
    threads = target.feature(kernel, "block") or 0
    ring = target.feature(kernel, "ring")
    if ring is None:
        return threads, target.feature(kernel, "shared") or 0
    # Decode: behind the ring, each streaming warp's outputs.
    return threads, ring + (threads // 32 - 1) * min(8, p.group) * p.head_dim * 4


def fit_sm(p: AttentionProblem, target: Target, kernel: str) -> int:
    """Blocks that an SM runs together."""
    return target.blocks_per_sm(kernel, *block_of(p, target, kernel))


def takes_row(p: AttentionProblem, target: Target) -> bool:
    """Whether one block on every SM of a Hopper GPU shares the step's only row (adr/0012).

    cards.json bounds the row's units (`row_units`). Up to `row_cluster_keys` keys, a cluster of eight blocks
    has one unit; longer rows are shared by all blocks.
    """
    if target.info.arch != "90a" or p.rows != 1 or p.dtype not in SIXTEEN:
        return False
    return p.units <= int(target.tuning.numbers(target.info, "attention")["row_units"])


def lacks_append(p: AttentionProblem, target: Target) -> str | None:
    """What decoding lacks to finish the projected heads of the step's tokens, each a row's only one."""
    if p.dtype not in (*SIXTEEN, E4M3) or (refusal(p) is not None):
        return f"a kernel for caches of {p.dtype} and heads of {p.head_dim}"
    if target.info.arch != "90a":
        return f"a Hopper GPU, not {target.info.name}"
    if not p.decode_only or p.tokens > p.rows:
        return "rows of one token each"
    tuned = target.tuning.numbers(target.info, "attention")
    few, most = int(tuned["append_rows"]), int(tuned["append_shared_rows"])
    if not (p.rows <= few or OWN_PARTS_ROWS < p.rows <= most):
        return f"up to {few} rows, or {OWN_PARTS_ROWS + 1} to {most}, not {p.rows}"
    return None


def decode_room(p: AttentionProblem, shares: int, longest: int) -> tuple[int, int]:
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
    if p.dtype not in (*SIXTEEN, "f32", E4M3):
        return f"a cache of bf16, f16, f32 or {E4M3}", p.dtype
    if p.dtype != "f32" and p.head_dim not in HEADS:
        return f"heads of {', '.join(map(str, HEADS))}", str(p.head_dim)
    if p.head_dim > 256:
        return "heads of at most 256", str(p.head_dim)
    if p.block_size % PAGE:
        return f"blocks of a multiple of {PAGE} tokens", str(p.block_size)
    return None
