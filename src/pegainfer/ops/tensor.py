"""Symbolic tensors: a name, a shape over step sizes, a storage format. They hold no data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import prod
from typing import Any

import msgspec
import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.runtime.weights.formats import FORMATS as STORED
from pegainfer.runtime.weights.formats import NUMPY_NAMES
from pegainfer.runtime.weights.weight import SCHEMES

# A dimension is a number, or the name of a size that changes from step to step (GLOSSARY.md):
# T tokens in the step, R rows (sequences) in the step, L rows whose logits are wanted.
Dim = int | str
Sizes = Mapping[str, int]

# How NumPy holds a plain dtype; bf16 and 8-bit floats as their bits (ops/stored.py).
NUMPY: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(text) for name, text in NUMPY_NAMES.items()},
    "bf16": np.dtype(np.uint16),
    "f8_e4m3": np.dtype(np.uint8),
}
FLOATS = ("f32", "f16", "bf16")
CACHED = (*FLOATS, "f8_e4m3")  # what keys and values may be stored as
WEIGHTS = tuple(SCHEMES)  # what a weight may be stored as
# dtype -> (elements a block, bytes a block), blocks along the last axis. Weights of several parts have none.
FORMATS: dict[str, tuple[int, int]] = {
    name: (STORED[name].elements, STORED[name].bytes)
    for name in (*NUMPY, *FLOATS, *WEIGHTS)
    if name in STORED
}


class Kind(StrEnum):
    INPUT = "input"  # staged by the host before each step
    WEIGHT = "weight"  # constant; its layout is the kernels' own
    STATE = "state"  # outlives the step: KV pages, recurrent states
    BUFFER = "buffer"  # lives in the arena between its first and last use
    OUTPUT = "output"  # a buffer that the host or the next program reads after the step


class Tensor(msgspec.Struct, frozen=True, eq=False):
    """A named, typed, symbolic array. Two tensors are the same only if they are the same object."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    kind: Kind
    base: Tensor | None = None  # the tensor whose storage this one views

    def sizes(self, env: Sizes) -> tuple[int, ...]:
        """The shape in numbers. Raises OpError for a size that `env` lacks."""
        try:
            return tuple([d if isinstance(d, int) else env[d] for d in self.shape])
        except KeyError as e:
            raise OpError(f"size {e.args[0]} of tensor {self.name} is unknown", got=dict(env)) from None

    def nbytes(self, env: Sizes) -> int:
        if self.dtype not in FORMATS:  # a weight of several parts
            return SCHEMES[self.dtype].nbytes(self.sizes(env))
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
