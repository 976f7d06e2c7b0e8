"""Lowering of what LoRA adapters add to linear layers and to the embedding."""

from __future__ import annotations

from pegainfer.lower.cuda.lowering import LoweringContext, blocks, handles
from pegainfer.lower.cuda.plan import ptr
from pegainfer.runtime.cuda.launch import i32
from pegainfer.runtime.cuda.tensor import item_bytes

# As lora.cu has them.
SHRINK_THREADS, SHRINK_CHANNELS, EXPAND_THREADS, LOOKUP_THREADS = 256, 4, 64, 128
TILE = 8  # tokens of a block that shares the factors among them
LONG_STEP = 256  # tokens from which on blocks of one token would read the factors too often


@handles("lora_shrink")
def _shrink(c: LoweringContext) -> None:
    """Threads of a block share K, also where there are few tokens."""
    s, dtype = c.sizes, c.dtype("down")
    if c.dtype("a") != dtype:
        raise c.refuse("dtype of a", dtype, c.dtype("a"))
    form, tokens, why = _form(c, "K", dtype)
    args = [
        *(ptr(c.address(name)) for name in ("out", "a", "down", "adapters", "ranks")),
        i32(s["T"]), i32(s["X"]), i32(s["K"]),
    ]  # fmt: skip
    grid = (blocks(s["X"], SHRINK_CHANNELS), blocks(s["T"], tokens), 1)
    c.launch(f"lora_shrink{form}_{dtype}", grid, SHRINK_THREADS, args, why=why)


@handles("lora_expand")
def _expand(c: LoweringContext) -> None:
    s, dtype, stored = c.sizes, c.dtype("x"), c.dtype("up")
    if dtype not in (stored, "f32") or (dtype, stored) == ("f32", "f16"):
        raise c.refuse("dtype of x", f"{stored}, or f32 beside bf16", dtype)
    form, tokens, why = _form(c, "N", stored)
    args = [
        *(ptr(c.address(name)) for name in ("x", "h", "up", "adapters", "ranks")),
        i32(s["T"]), i32(s["X"]), i32(s["N"]),
    ]  # fmt: skip
    each = 1 if form == "_any" else 16 // item_bytes(stored)
    grid = (blocks(s["N"], EXPAND_THREADS * each), blocks(s["T"], tokens), 1)
    suffix = "" if dtype == stored else f"_{dtype}"
    c.launch(f"lora_expand{form}_{stored}{suffix}", grid, EXPAND_THREADS, args, why=why)


@handles("lora_lookup")
def _lookup(c: LoweringContext) -> None:
    s = c.sizes
    args = [
        *(ptr(c.address(name)) for name in ("out", "table", "ids", "adapters", "ranks")),
        i32(s["X"]), i32(s["V"]),
    ]  # fmt: skip
    c.launch(f"lora_lookup_{c.dtype('table')}", (s["T"], 1, 1), LOOKUP_THREADS, args)


def _form(c: LoweringContext, width: str, dtype: str) -> tuple[str, int, str]:
    """The kernel's form, tokens of its blocks, and the reason."""
    if c.sizes[width] % (16 // item_bytes(dtype)):
        return "_any", 1, "rows are not aligned to 16 bytes"
    if c.sizes["T"] >= LONG_STEP:
        return "_tile", TILE, f"{LONG_STEP} tokens or more"
    return "", 1, f"fewer than {LONG_STEP} tokens"
