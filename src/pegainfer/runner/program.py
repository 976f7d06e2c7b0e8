"""What the programs of page-based lines have in common: step inputs, sizes, storage formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import KVSpec, PageGroup, RunnerInfo
from pegainfer.ops.tensor import FORMATS, Dim

# name -> shape; int32, staged by the host before each step (kv/device/stage.py says what they hold).
INPUTS: dict[str, tuple[str, ...]] = {
    "token_ids": ("T",),
    "positions": ("T",),
    "slots": ("T",),
    "query_starts": ("R",),
    "query_lens": ("R",),
    "context_lens": ("R",),
    "block_table": ("R", "W"),
    "logit_rows": ("L",),
}


@dataclass(frozen=True)
class Formats:
    """Storage formats of what a step computes and keeps. All float32 on the CPU; bf16 on a GPU.

    Args:
        activation: of what passes between the ops of a layer.
        residual: of the residual stream, which every layer adds to.
        kv: of cached keys and values.
    """

    activation: str = "f32"
    residual: str = "f32"
    kv: str = "f32"


@dataclass(frozen=True)
class Sizes:
    """What a recorded program is sized for beside the model's own widths."""

    num_blocks: int
    block_size: int
    blocks_per_seq: int
    num_positions: int  # rows of the rotation's table: the served length

    @classmethod
    def of(cls, info: RunnerInfo) -> Sizes:
        """Of a runner whose one group is pages."""
        block_size = only_group(info.kv).block_size
        return cls(
            num_blocks=info.num_blocks[0],
            block_size=block_size,
            blocks_per_seq=-(-info.max_model_len // block_size),
            num_positions=info.max_model_len,
        )


def largest_step(info: RunnerInfo) -> dict[str, int]:
    """What changes from step to step, at its largest: the sizes that arenas are planned for."""
    return {"T": info.max_tokens, "R": info.max_slots, "L": info.max_slots}


def page_spec(num_layers: int, kv_size: int, block_size: int, kv_format: str) -> KVSpec:
    """One group of pages. All layers of a block lie together, so that a block is one copy.

    Args:
        kv_size: values of a token's keys in one layer, and as many of its values.
    """
    values = num_layers * 2 * kv_size * block_size
    bytes_per_block = values * FORMATS[kv_format][1]
    return KVSpec((PageGroup(name="kv", block_size=block_size, bytes_per_block=bytes_per_block),))


def only_group(kv: KVSpec) -> PageGroup:
    """The one page group of a `page_spec`. Raises InvariantError for any other."""
    group = kv.groups[0]
    if len(kv.groups) != 1 or not isinstance(group, PageGroup):
        raise InvariantError(f"expected one group of pages, got {kv}")
    return group


def shape(letters: tuple[str, ...], axes: Mapping[str, int]) -> tuple[Dim, ...]:
    """Letters that are not among `axes` change from step to step and stay symbolic."""
    return tuple(axes.get(letter, letter) for letter in letters)
