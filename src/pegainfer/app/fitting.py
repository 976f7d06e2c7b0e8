"""Whether a model fits into the machine's memory; if not, by how much, and what would."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from pegainfer.app.memory import sequence_bytes
from pegainfer.app.registry import Model
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import RunnerInfo
from pegainfer.kv.device.layout import GroupLayout, block_bytes
from pegainfer.runtime.weights.weight import Weight

GIB = 1 << 30
# Bits a value of a matrix in GGUF files of these kinds.
FILE_BITS = {"Q8_0": 8.5, "Q4_K_M": 4.9}


class Need(msgspec.Struct, frozen=True):
    """Bytes that a model takes on the CPU.

    Args:
        weights: as they are packed, tables included.
        cache: KV blocks and states.
        least_cache: those of one sequence of the served length.
        values: of all matrices.
        matrices: bytes of those.
    """

    weights: int
    cache: int
    least_cache: int
    values: int
    matrices: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def host_weights(model: Model, length: int) -> int:
    """Bytes of the weights on the CPU, with the tables for sequences of `length` tokens."""
    vectors = sum(prod(w.shape) for w in model.weights.values() if len(w.shape) == 1)
    tables = model.weight_bytes(length) - model.weight_bytes(0)
    return sum(w.scheme.nbytes(w.shape) for w in _matrices(model)) + 4 * vectors + tables


def need_of(model: Model, groups: Sequence[GroupLayout], info: RunnerInfo, ranks: int = 1) -> Need:
    """What `ranks` processes need together, of which `model` and `groups` are one."""
    cache = sum(n * block_bytes(g) for g, n in zip(groups, info.num_blocks, strict=True))
    return Need(
        weights=ranks * host_weights(model, info.max_model_len),
        cache=ranks * cache,
        least_cache=ranks * sequence_bytes(groups, info.max_model_len),
        values=ranks * sum(prod(w.shape) for w in _matrices(model)),
        matrices=ranks * sum(w.scheme.nbytes(w.shape) for w in _matrices(model)),
    )


def _matrices(model: Model) -> list[Weight]:
    return [w for w in model.weights.values() if len(w.shape) > 1]


def check_fits(need: Need, free: int) -> None:
    """Raises ConfigError where the model takes more than `free` bytes."""
    if need.total <= free:
        return
    raise ConfigError(
        "the model does not fit into memory",
        expected=f"≤ {free / GIB:.2f} GiB, which are free",
        got=f"{need.total / GIB:.2f} GiB (weights {need.weights / GIB:.2f}, KV cache "
        f"{need.cache / GIB:.2f}): {(need.total - free) / GIB:.2f} GiB too much",
        remedy=_remedy(need, free),
    )


def _remedy(need: Need, free: int) -> str:
    """The ways that would fit: less cache, a file with fewer bits, or more memory."""
    ways = []
    if need.weights + need.least_cache <= free and need.least_cache < need.cache:
        ways.append(f"set kv_cache_memory to at most {(free - need.weights) / GIB:.2f} GiB")
    for kind, bits in FILE_BITS.items():
        file = need.weights - need.matrices + int(need.values * bits / 8)
        cache = min(need.cache, max(need.least_cache, free - file))
        if file < need.weights and file + cache <= free:
            ways.append(f"use a {kind} file, some {file / GIB:.2f} GiB")
            break
    least = need.weights + min(need.cache, need.least_cache)
    return "; or ".join(ways) or f"use a machine with {least / GIB:.2f} GiB free, or lower max_model_len"
