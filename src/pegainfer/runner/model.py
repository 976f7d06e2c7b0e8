"""A model of pages: its parts, as a line puts them together, and what the engine asks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pegainfer.contract.step import KVSpec, RunnerInfo
from pegainfer.ops.backend import Backend
from pegainfer.ops.program import Program
from pegainfer.ops.sampler import Head, hidden_states, prompt_logprobs, sampler
from pegainfer.runner.host import HostRunner
from pegainfer.runner.program import Formats, Sizes, only_group, page_spec
from pegainfer.runtime.weights.raw import RawWeight

Forward = Callable[[Mapping[str, str], Sizes, Formats], Program]
MakeHead = Callable[[Mapping[str, str], str], Head]


class DecoderConfig(Protocol):
    """What the runner reads of a line's config."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class PagedModel:
    """A model whose weights are mapped but not yet packed. Serves app/registry.py's Model.

    A line whose parts differ (a state beside pages, a sampler of its own) has a class of its own instead.

    Args:
        config: its max_position_embeddings are tokens that can be served.
        weights: every weight by the forward's name.
        cos_sin: the rotation's table for so many positions, [positions, D] f32.
        forward: records the line's forward pass for storage formats of weights, sizes and formats of steps.
        head: the forward's end, for a residual stream in this format.
    """

    config: DecoderConfig
    weights: Mapping[str, RawWeight]
    cos_sin: Callable[[int], RawWeight]
    forward: Forward
    head: MakeHead

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.config.max_position_embeddings

    @property
    def formats(self) -> dict[str, str]:
        """Storage format of each weight by name."""
        return {name: w.format for name, w in self.weights.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each weight by name."""
        return {name: w.shape for name, w in self.weights.items()}

    def kv_spec(self, block_size: int, kv_dtype: str) -> KVSpec:
        c = self.config
        return page_spec(c.num_layers, c.num_kv_heads * c.head_dim, block_size, kv_dtype)

    def tensors(self, num_positions: int) -> dict[str, RawWeight]:
        """Every constant of the programs by name; `num_positions` is the served length."""
        return {**self.weights, "cos_sin": self.cos_sin(num_positions)}

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """One block of the KV cache: [Y, 2, G, S, D]."""
        c = self.config
        return (c.num_layers, 2, c.num_kv_heads, block_size, c.head_dim)

    def programs(self, info: RunnerInfo, steps: Formats, max_logprobs: int) -> dict[str, Program]:
        """What a step runs, by the fields of runner/host.py's Programs.

        Args:
            steps: storage formats of what a step computes and keeps.
        """
        return {
            "forward": self.forward(self.formats, Sizes.of(info), steps).on_one_rank(),
            "sampler": sampler(info.vocab_size, info.max_slots, info.max_model_len + 1, max_logprobs),
            "prompt_logprobs": prompt_logprobs(self.head(self.formats, steps.residual), max_logprobs),
            "hidden_states": hidden_states(self.head(self.formats, steps.residual)),
        }

    def build(self, info: RunnerInfo, backend: Backend, *, kv_dtype: str, max_logprobs: int) -> HostRunner:
        """A runner on `backend`, which holds `tensors(info.max_model_len)` and is closed with the runner.

        Args:
            info: its KV is that of `kv_spec`.
            kv_dtype: a key of runner/host.py's KV_FORMATS.

        Raises ConfigError where memory for the KV cache cannot be had.
        """
        max_logprobs = min(max_logprobs, info.vocab_size)
        return HostRunner.build(
            self.programs(info, Formats(kv=kv_dtype), max_logprobs),
            info,
            backend,
            self.block_shape(only_group(info.kv).block_size),
            kv_format=kv_dtype,
            max_logprobs=max_logprobs,
        )
