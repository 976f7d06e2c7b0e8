"""What LoRA adapters add to linear layers and to the embedding, in launches of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegainfer.lower.cuda.lowering import LoweringContext, blocks, handles
from pegainfer.lower.cuda.plan import Place, Struct, ptr, struct
from pegainfer.runtime.cuda.launch import i32
from pegainfer.runtime.cuda.lora_arguments import LORA
from pegainfer.runtime.cuda.tensor import item_bytes

# As lora.cu has them.
SHRINK_THREADS, SHRINK_CHANNELS, EXPAND_THREADS, LOOKUP_THREADS = 256, 4, 64, 128
TILE = 8  # tokens of a block that shares the factors among them
WIDE = 1 << 15  # outputs (logits) from which on a block takes several tokens even in short steps
LONG_STEP = 256  # tokens from which on blocks of one token would read the factors too often


@dataclass(frozen=True)
class LoraProblem:
    """The adapters of GEMMs that have the same inputs.

    Args:
        factors: the members of a lora::Factor for each GEMM.
        adapters: [T] int32, each token's adapter; negative: none.
        tokens, most, k: T, X and K.
        ld: elements between rows of x.
        step: elements between neighbouring outputs of a GEMM in a row of x.
        dtype: of the factors.
    """

    factors: Sequence[Mapping[str, Any]]
    adapters: Place
    tokens: int
    most: int
    k: int = 0
    ld: int = 0
    step: int = 1
    dtype: str = "bf16"

    def args(self, h: Place, a: Place | None = None, x: Place | None = None) -> Struct:
        """lora::Args."""
        return struct(
            LORA, h=h, a=a, x=x, adapters=self.adapters, tokens=self.tokens, most=self.most, k=self.k,
            ld=self.ld, step=self.step, factors=len(self.factors), factor=self.factors,
        )  # fmt: skip


def factor(
    down: Place | None, up: Place | None, ranks: Place, n: int = 0, first: int = 0
) -> Mapping[str, Any]:
    """The members of a lora::Factor."""
    return {"down": down, "up": up, "ranks": ranks, "n": n, "first": first}


def shrink(c: LoweringContext, p: LoraProblem, h: Place, a: Place) -> None:
    """h = a · down of each token's adapter, [factors, T, X] float32. The threads of a block split K."""
    form, tokens, why = _form(p, [p.k])
    grid = (blocks(p.most, SHRINK_CHANNELS), blocks(p.tokens, tokens), len(p.factors))
    c.launch(f"lora_shrink{form}_{p.dtype}", grid, SHRINK_THREADS, [p.args(h, a=a)], why=why)


def expand(c: LoweringContext, p: LoraProblem, x: Place, h: Place, dtype: str) -> None:
    """Adds h · up of each token's adapter to x, of this dtype."""
    widths = [int(f["n"]) for f in p.factors]
    aligned = [*widths, p.ld, *(int(f["first"]) for f in p.factors if p.step == 1)]
    form, tokens, why = _form(p, aligned, TILE if max(widths) >= WIDE else LONG_STEP)
    each = 1 if form == "_any" else 16 // item_bytes(p.dtype)
    grid = (blocks(max(widths), EXPAND_THREADS * each), blocks(p.tokens, tokens), len(p.factors))
    suffix = "" if dtype == p.dtype else f"_{dtype}"
    c.launch(f"lora_expand{form}_{p.dtype}{suffix}", grid, EXPAND_THREADS, [p.args(h, x=x)], why=why)


@handles("lora_shrink")
def _shrink(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("down")
    if c.dtype("a") != dtype:
        raise c.refuse("dtype of a", dtype, c.dtype("a"))
    factors = [factor(c.address("down"), None, c.address("ranks"))]
    p = LoraProblem(factors, c.address("adapters"), s["T"], s["X"], s["K"], dtype=dtype)
    shrink(c, p, c.address("out"), c.address("a"))


@handles("lora_expand")
def _expand(c: LoweringContext) -> None:
    s, dtype, stored = c.sizes, c.dtype("x"), c.dtype("up")
    if dtype not in (stored, "f32") or (dtype, stored) == ("f32", "f16"):
        raise c.refuse("dtype of x", f"{stored}, or f32 beside bf16", dtype)
    factors = [factor(None, c.address("up"), c.address("ranks"), s["N"])]
    p = LoraProblem(factors, c.address("adapters"), s["T"], s["X"], ld=s["N"], dtype=stored)
    expand(c, p, c.address("x"), c.address("h"), dtype)


@handles("lora_lookup")
def _lookup(c: LoweringContext) -> None:
    s = c.sizes
    args = [
        *(ptr(c.address(name)) for name in ("out", "table", "ids", "adapters", "ranks")),
        i32(s["X"]), i32(s["V"]),
    ]  # fmt: skip
    c.launch(f"lora_lookup_{c.dtype('table')}", (s["T"], 1, 1), LOOKUP_THREADS, args)


def _form(p: LoraProblem, widths: Sequence[int], long: int = LONG_STEP) -> tuple[str, int, str]:
    """The kernel's form, tokens of its blocks, and the reason.

    Args:
        widths: elements of rows that the aligned kernels read 16 bytes at a time.
        long: tokens from which on a block takes several.
    """
    if any(width % (16 // item_bytes(p.dtype)) for width in widths):
        return "_any", 1, "rows are not aligned to 16 bytes"
    if p.tokens >= long:
        return "_tile", TILE, f"{long} tokens or more"
    return "", 1, f"fewer than {long} tokens"
