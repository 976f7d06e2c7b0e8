"""Adapters as a runner's programs read them, and those that a host runner holds, side by side in arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import RunnerInfo
from pegainfer.ops.adapters import AdaptedWeight, base_modules
from pegainfer.ops.program import Program
from pegainfer.ops.tensor import NUMPY, Kind
from pegainfer.runtime.weights.adapter import THREADS, Factors, read_adapter

Array = np.ndarray[Any, Any]


class Laid(NamedTuple):
    """The factors of one weight as the states hold them: down [r, K] (of an embedding [V, r]), up [r, N]."""

    down: Array
    up: Array

    @property
    def rank(self) -> int:
        return int(self.up.shape[0])


class AdapterReader:
    """Reads adapters of one model. For any thread."""

    def __init__(self, weights: Collection[AdaptedWeight], max_rank: int, *, bf16: bool = False) -> None:
        """`bf16`: factors are the bits of bf16, as uint16."""
        self._weights, self._bf16 = tuple(weights), bf16
        self._modules = base_modules(weights)
        self._max_rank = max_rank

    def read(self, name: str, path: str) -> tuple[AdapterInfo, dict[str, Laid]]:
        """See AdapterRunner; the factors by the weight's key, float32 or as `bf16` says."""
        adapter = read_adapter(Path(path), self._modules, self._max_rank, bf16=self._bf16)
        named = [w for w in self._weights if w.module in adapter.factors]
        with ThreadPoolExecutor(THREADS, "adapter") as pool:
            parts = pool.map(lambda w: _lay(w, adapter.factors[w.module]), named)
            laid = {w.key: part for w, part in zip(named, parts, strict=True)}
        return AdapterInfo(name=name, path=path, digest=adapter.digest, rank=adapter.rank), laid


def _lay(weight: AdaptedWeight, factors: Factors) -> Laid:
    up = factors.up.T
    if weight.rows is not None:
        up = up[:, np.concatenate([np.arange(r.start, r.stop, r.step) for r in weight.rows])]
    down = factors.down.T if weight.base.embedding else factors.down
    if weight.shard is not None:
        axis, rank, ranks = weight.shard
        if axis == 0:
            up = np.split(up, ranks, axis=1)[rank]
        else:
            down = np.split(down, ranks, axis=1)[rank]
    return Laid(np.ascontiguousarray(down), np.ascontiguousarray(up))


class HostAdapters:
    """Factors by adapter index. An index that is free has rank 0 everywhere, and its old factors stay unread.

    Args:
        states: the arrays by the programs' names. Pages of an index that no adapter has had take no memory.
    """

    def __init__(self, program: Program, weights: Collection[AdaptedWeight], info: RunnerInfo) -> None:
        """`program`: as ops/adapters.py rewrote it."""
        self._weights = tuple(weights)
        self._reader = AdapterReader(weights, info.max_adapter_rank)
        self._size = info.max_adapters
        keys = {f"{w.key}.{part}" for w in weights for part in ("down", "up", "ranks")}
        self.states: dict[str, Array] = {
            t.name: np.zeros(t.sizes({}), NUMPY[t.dtype])
            for t in program.tensors(Kind.STATE)
            if t.name in keys
        }
        self._installed: set[int] = set()

    def read(self, name: str, path: str) -> tuple[AdapterInfo, dict[str, Laid]]:
        """See AdapterRunner. Any thread."""
        return self._reader.read(name, path)

    def install(self, index: int, laid: Mapping[str, Laid]) -> None:
        """Copies the factors. Raises InvariantError for an index that is taken or does not exist."""
        if not 0 <= index < self._size or index in self._installed:
            raise InvariantError(f"adapter index {index} is taken or does not exist")
        self._installed.add(index)
        for w in self._weights:
            factors = laid.get(w.key)
            if factors is None:
                continue
            rank, down = factors.rank, self.states[f"{w.key}.down"][index]
            channels = down[:, :rank] if w.base.embedding else down[:rank]
            channels[...] = factors.down
            self.states[f"{w.key}.up"][index, :rank] = factors.up
            self.states[f"{w.key}.ranks"][index] = rank

    def remove(self, index: int) -> None:
        """Raises InvariantError for an index without an adapter."""
        if index not in self._installed:
            raise InvariantError(f"adapter {index} is removed but not installed")
        self._installed.remove(index)
        for name, state in self.states.items():
            if name.endswith(".ranks"):
                state[index] = 0
