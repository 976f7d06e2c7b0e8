"""A seeded llama of awkward sizes on the CPU kernels, driven step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.lower.cpu.backend import CpuBackend, CpuOptions
from pegainfer.lower.cpu.executor import CpuExecutor
from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.forward import forward, groups, shapes
from pegainfer.ops.program import Program
from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.ops.stored import held
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.weights.weight import Weight, float32
from tests.support.awkward import CONFIG as CONFIG

Array = np.ndarray[Any, Any]

BLOCKS, BLOCK_SIZE, WIDTH = 96, 16, 40
LARGEST = {"T": 700, "R": 24, "L": 700}


def weights(config: LlamaConfig, formats: Mapping[str, str], seed: int = 7) -> dict[str, Weight]:
    """Every constant of the forward program, seeded."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes(config).items():
        values = rng.standard_normal(shape).astype(np.float32)
        values = values / 8 + 1 if len(shape) == 1 else values * np.float32(1.5 / shape[-1] ** 0.5)
        made[name] = quantized_weight(formats[name], values)
    table = cos_sin_table(config.max_position_embeddings, inverse_frequencies(config.head_dim, 1e4, None))
    return {**made, "cos_sin": float32(table)}


def formats_of(config: LlamaConfig, matrices: Sequence[str]) -> dict[str, str]:
    """Formats taken in turn by the matrices; norms are float32."""
    two = [name for name, shape in shapes(config).items() if len(shape) == 2]
    given = {name: matrices[i % len(matrices)] for i, name in enumerate(two)}
    return {name: given.get(name, "f32") for name in shapes(config)}


def program(config: LlamaConfig, formats: Mapping[str, str], kv_dtype: str = "f32") -> Program:
    steps = Formats(kv=kv_dtype)
    sizes = Sizes(groups(config, BLOCK_SIZE, steps), (BLOCKS,), config.max_position_embeddings)
    return forward(config, formats, sizes, steps)


def cache(config: LlamaConfig, kv_dtype: str = "f32") -> Array:
    """An empty pool, full of NaN."""
    shape = (BLOCKS, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return held(np.full(shape, np.nan, np.float32), kv_dtype)


@dataclass(frozen=True)
class Span:
    """Tokens ids[start : start + count] of a sequence whose blocks are `blocks`."""

    ids: Array
    blocks: Array
    start: int
    count: int


def stage(spans: Sequence[Span]) -> tuple[dict[str, Array], dict[str, int]]:
    """A step's inputs and sizes; logits of every token."""
    counts = np.array([s.count for s in spans], np.int32)
    positions = [np.arange(s.start, s.start + s.count) for s in spans]
    table = np.full((len(spans), WIDTH), BLOCKS - 1, np.int32)
    for row, s in enumerate(spans):
        table[row, : len(s.blocks)] = s.blocks
    places = list(zip(spans, positions, strict=True))
    slots = [s.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in places]
    total = int(counts.sum())
    inputs = {
        "token_ids": np.concatenate([s.ids[p] for s, p in places]),
        "positions": np.concatenate(positions),
        "kv.places": np.concatenate(slots),
        "query_starts": np.cumsum(counts) - counts,
        "query_lens": counts,
        "context_lens": np.array([s.start + s.count for s in spans]),
        "kv.block_table": table,
        "logit_rows": np.arange(total),
    }
    return {k: a.astype(np.int32) for k, a in inputs.items()}, {"T": total, "R": len(spans), "L": total}


class Model:
    """One backend with the forward program ready."""

    def __init__(
        self,
        options: CpuOptions,
        matrices: Sequence[str] = ("f32",),
        kv_dtype: str = "f32",
        config: LlamaConfig = CONFIG,
    ) -> None:
        formats = formats_of(config, matrices)
        self.weights = weights(config, formats)
        self.program = program(config, formats, kv_dtype)
        self.kv = cache(config, kv_dtype)
        self.backend = CpuBackend(self.weights, options)
        self.executor: CpuExecutor = self.backend.prepare(self.program, {"kv": self.kv}, LARGEST)

    def logits(self, spans: Sequence[Span]) -> Array:
        """[tokens, V], in the spans' order."""
        inputs, env = stage(spans)
        return self.executor.run(inputs, env)["logits"].copy()
