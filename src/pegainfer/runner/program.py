"""What a line's forward program is recorded with: step inputs, KV groups, storage formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pegainfer.contract.errors import OpError
from pegainfer.contract.step import RunnerInfo
from pegainfer.kv.device.layout import GroupLayout, PageLayout, Part, StateLayout
from pegainfer.ops.program import Builder
from pegainfer.ops.tensor import Dim, Tensor

# name -> shape; int32, staged by the runner before each step (runner/staging.py says what they hold).
INPUTS: dict[str, tuple[str, ...]] = {
    "token_ids": ("T",),
    "positions": ("T",),
    "query_starts": ("R",),
    "query_lens": ("R",),
    "context_lens": ("R",),
    "logit_rows": ("L",),
}


class Formats(msgspec.Struct, frozen=True):
    """Storage formats of what a step computes and keeps. All float32 on the CPU; bf16 on a GPU.

    Args:
        activation: of what passes between the ops of a layer.
        residual: of the residual stream, which every layer adds to.
        kv: of cached keys and values.
        state: of recurrent states' matrices.
    """

    activation: str = "f32"
    residual: str = "f32"
    kv: str = "f32"
    state: str = "f32"


class PageTensors(msgspec.Struct, frozen=True):
    """A group of pages in a program.

    Args:
        parts: by name: [N, *shape], N blocks.
        places: [T] int32, where each token goes: block · S + offset of a block of S tokens; -1: nowhere.
        block_table: [R, W] int32, the blocks of each row's sequence in order.
    """

    parts: Mapping[str, Tensor]
    places: Tensor
    block_table: Tensor


class StateTensors(msgspec.Struct, frozen=True):
    """A group of states in a program.

    Args:
        parts: by name: [N, *shape], N states.
        state_ids: [R] int32, the state that each row reads and writes in place; -1 for a padded row. A row
            whose first position is 0 starts from zeros, whatever the state holds.
        state_saves: [T] int32, the state into which the state after this token is also written; -1: none.
    """

    parts: Mapping[str, Tensor]
    state_ids: Tensor
    state_saves: Tensor


class Sizes(msgspec.Struct, frozen=True):
    """What a recorded program is sized for beside the model's own widths.

    Args:
        groups: of the line, in the order of its KVSpec.
        num_blocks: blocks or states of each group.
        num_positions: the served length: rows of the rotation's table, tokens that a block table covers.
    """

    groups: tuple[GroupLayout, ...]
    num_blocks: tuple[int, ...]
    num_positions: int

    @classmethod
    def of(cls, info: RunnerInfo, groups: Sequence[GroupLayout]) -> Sizes:
        return cls(tuple(groups), info.num_blocks, info.max_model_len)

    def pages(self, b: Builder, name: str) -> PageTensors:
        """Declares a group of pages in `b`. Raises OpError where the line has no such group."""
        group, parts = self._parts(b, name)
        if not isinstance(group, PageLayout):
            raise OpError(f"KV group {name} holds no pages", got=group)
        width = -(-self.num_positions // group.block_size)
        return PageTensors(parts, b.input(f"{name}.places", "T"), b.input(f"{name}.block_table", "R", width))

    def states(self, b: Builder, name: str) -> StateTensors:
        """Declares a group of states in `b`. Raises OpError where the line has no such group."""
        group, parts = self._parts(b, name)
        if not isinstance(group, StateLayout):
            raise OpError(f"KV group {name} holds no states", got=group)
        return StateTensors(parts, b.input(f"{name}.state_ids", "R"), b.input(f"{name}.state_saves", "T"))

    def _parts(self, b: Builder, name: str) -> tuple[GroupLayout, dict[str, Tensor]]:
        for group, count in zip(self.groups, self.num_blocks, strict=True):
            if group.name == name:
                return group, {p.name: b.state(p.name, count, *p.shape, dtype=p.dtype) for p in group.parts}
        raise OpError("no such KV group", expected=" ".join(g.name for g in self.groups), got=name)


def kv_pages(
    num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, formats: Formats
) -> PageLayout:
    """The group `kv`: keys and values. All layers of a block lie together, so that a block is one copy."""
    shape = (num_layers, 2, num_kv_heads, block_size, head_dim)
    return PageLayout("kv", (Part("kv", shape, formats.kv),), block_size)


def largest_step(info: RunnerInfo) -> dict[str, int]:
    """What changes from step to step, at its largest: the sizes that arenas are planned for."""
    return {"T": info.max_tokens, "R": info.max_slots, "L": info.max_slots}


def shape(letters: tuple[str, ...], axes: Mapping[str, int]) -> tuple[Dim, ...]:
    """Letters that are not among `axes` change from step to step and stay symbolic."""
    return tuple(axes.get(letter, letter) for letter in letters)
