"""Symbolic tensors: a name, a shape over step sizes, a storage format. They hold no data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.runtime.weights.formats import FORMATS as STORED

# A dimension is a number, or the name of a size that changes from step to step (GLOSSARY.md):
# T tokens in the step, R rows (sequences) in the step, L rows whose logits are wanted.
Dim = int | str
Sizes = Mapping[str, int]

# format -> (elements a block, bytes a block), blocks along the last axis: what the kernels know of the
# formats that a weights file may have.
FORMATS: dict[str, tuple[int, int]] = {
    name: (STORED[name].elements, STORED[name].bytes)
    for name in (
        *("f64", "f32", "f16", "bf16", "i64", "u64", "i32", "u32", "u8"),
        *("q4_0", "q4_1", "q8_0", "q4_k", "q6_k"),
    )
}
# How NumPy holds a plain dtype, little-endian as files have it; it has none for bf16.
NUMPY: dict[str, np.dtype[Any]] = {
    name: np.dtype(f"<{name[0]}{int(name[1:]) // 8}")
    for name in ("f64", "f32", "f16", "i64", "u64", "i32", "u32", "u8")
}
FLOATS = ("f32", "f16", "bf16")
WEIGHTS = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k")


class Kind(StrEnum):
    INPUT = "input"  # staged by the host before each step
    WEIGHT = "weight"  # constant; its layout is the kernels' own
    STATE = "state"  # outlives the step: KV pages, recurrent states
    BUFFER = "buffer"  # lives in the arena between its first and last use
    OUTPUT = "output"  # a buffer that the host or the next program reads after the step


@dataclass(frozen=True, eq=False)
class Tensor:
    """A named, typed, symbolic array. Two tensors are the same only if they are the same object."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    kind: Kind
    base: Tensor | None = field(default=None, repr=False)  # the tensor whose storage this one views

    def sizes(self, env: Sizes) -> tuple[int, ...]:
        """The shape in numbers. Raises OpError for a size that `env` lacks."""
        try:
            return tuple([d if isinstance(d, int) else env[d] for d in self.shape])
        except KeyError as e:
            raise OpError(f"size {e.args[0]} of tensor {self.name} is unknown", got=dict(env)) from None

    def nbytes(self, env: Sizes) -> int:
        per_block, block_bytes = FORMATS[self.dtype]
        return prod(self.sizes(env)) // per_block * block_bytes

    def view(self, *shape: Dim) -> Tensor:
        """The same storage under another shape; symbolic dimensions must stand in the same order."""
        mine = (
            [d for d in self.shape if isinstance(d, str)],
            prod(d for d in self.shape if isinstance(d, int)),
        )
        theirs = [d for d in shape if isinstance(d, str)], prod(d for d in shape if isinstance(d, int))
        if mine != theirs:
            raise OpError(f"cannot view {self}", expected=self.shape, got=shape)
        return Tensor(self.name, shape, self.dtype, self.kind, self.storage)

    @property
    def storage(self) -> Tensor:
        """The tensor that owns the bytes."""
        return self.base if self.base is not None else self

    def __str__(self) -> str:
        return f"{self.name}: [{', '.join(map(str, self.shape))}] {self.dtype}"
