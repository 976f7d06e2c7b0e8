"""Divides memory among the KV groups of a line: pages, states of running sequences, snapshots of states."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device.layout import GroupLayout, PageLayout, StateLayout, block_bytes

log = logging.getLogger(__name__)

STATES_SHARE = 0.5  # most of the memory that the states of the default number of sequences may take


class Wish(msgspec.Struct, frozen=True):
    """What a cache is divided for.

    Args:
        slots: sequences that run at once.
        slots_asked: whether the user named that number; it is lowered to what fits otherwise.
        length: tokens of a sequence.
        length_asked: whether the user named it; likewise.
        step_tokens: prompt tokens in a step.
        snapshot_share: of what the states of running sequences leave, the share for snapshots.
        most_tokens: that pages are made for, beyond the length of one sequence; 0: as many as fit.
    """

    slots: int
    slots_asked: bool
    length: int
    length_asked: bool
    step_tokens: int
    snapshot_share: float
    most_tokens: int = 0


class Division(msgspec.Struct, frozen=True):
    """What the memory holds: sequences at once, tokens of one sequence, blocks or states of each group."""

    slots: int
    length: int
    num_blocks: tuple[int, ...]


def sequence_bytes(groups: Sequence[GroupLayout], length: int) -> int:
    """Bytes that one sequence of `length` tokens needs when it is alone."""
    pages = sum(-(-length // g.block_size) * block_bytes(g) for g in _pages(groups) if not g.window)
    windows = sum(_window_span(g) * block_bytes(g) for g in _pages(groups) if g.window)
    return pages + windows + state_bytes(groups)


def state_bytes(groups: Sequence[GroupLayout]) -> int:
    """Bytes of one state of every state group."""
    return sum(block_bytes(g) for g in groups if isinstance(g, StateLayout))


def divide(
    groups: Sequence[GroupLayout],
    memory: int,
    wish: Wish,
    *,
    where: str = "",
    remedy: str = "raise kv_cache_memory, or lower max_model_len or max_slots",
) -> Division:
    """How `memory` bytes are used.

    Each running sequence has one state a group, and the snapshots get their share of what is left. Pages get
    the rest, all groups for the same number of tokens; a group with a window gets no more than twice what all
    sequences can hold in their windows.

    Args:
        where: what the memory is part of, for errors.
        remedy: what the user can do, for errors.

    Raises ConfigError where the states of the wished sequences, or one sequence of the wished length, do not
    fit.
    """
    state, slots = state_bytes(groups), wish.slots
    if state and not wish.slots_asked:
        slots = max(1, min(slots, int(memory * STATES_SHARE) // state))
        if slots < wish.slots:
            log.warning("max_slots lowered to %d: a sequence's state takes %d MiB", slots, state >> 20)
    if slots * state > memory:
        raise ConfigError(
            "the KV cache cannot hold the states of max_slots sequences",
            expected=f"≥ {slots * state / 2**20:.2f} MiB for {slots} sequences",
            got=f"{memory / 2**20:.2f} MiB{where}",
            remedy=remedy,
        )
    left = memory - slots * state
    snapshots = _num_snapshots(groups, left, state, wish)
    pages = _num_pages(groups, left - snapshots * state, slots, wish)
    num_blocks = tuple(pages[g.name] if isinstance(g, PageLayout) else slots + snapshots for g in groups)
    return Division(slots, _fitting_length(groups, pages, memory, wish, where, remedy), num_blocks)


def _num_snapshots(groups: Sequence[GroupLayout], left: int, state: int, wish: Wish) -> int:
    if not any(isinstance(g, StateLayout) and g.snapshot_every for g in groups):
        return 0
    if not _pages(groups):
        return left // state
    # One sequence of the wished length comes before snapshots.
    spare = left - (sequence_bytes(groups, wish.length) - state)
    return max(0, min(int(left * wish.snapshot_share), spare)) // state


def _num_pages(groups: Sequence[GroupLayout], memory: int, slots: int, wish: Wish) -> dict[str, int]:
    """Blocks of each page group: as many tokens as fit."""
    pages = _pages(groups)
    if not pages:
        return {}
    unit = min(g.block_size for g in pages)

    def blocks(units: int) -> dict[str, int]:
        return {g.name: min(-(-units * unit // g.block_size), _most_blocks(g, slots, wish)) for g in pages}

    def nbytes(units: int) -> int:
        found = blocks(units)
        return sum(found[g.name] * block_bytes(g) for g in pages)

    # A group without a window always grows, so the bytes do; otherwise the wished tokens are a bound.
    low, high = 0, memory // min(block_bytes(g) for g in pages) + 1
    if wish.most_tokens:
        high = min(high, -(-max(wish.most_tokens, wish.length) // unit) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if nbytes(middle) <= memory else (low, middle)
    return blocks(low)


def _fitting_length(
    groups: Sequence[GroupLayout], pages: dict[str, int], memory: int, wish: Wish, where: str, remedy: str
) -> int:
    """The wished length, or a shorter one that the pages hold."""
    length = min([wish.length, *(pages[g.name] * g.block_size for g in _pages(groups) if not g.window)])
    held = all(pages[g.name] >= _window_span(g) for g in _pages(groups) if g.window)
    if held and length == wish.length:
        return length
    if held and length > 0 and not wish.length_asked:
        log.warning("max_model_len lowered to %d: the KV cache of %d MiB holds no more", length, memory >> 20)
        return length
    need = sequence_bytes(groups, wish.length) + (wish.slots - 1) * state_bytes(groups)
    raise ConfigError(
        "the KV cache cannot hold one sequence of max_model_len tokens",
        expected=f"≥ {need / 2**20:.2f} MiB for {wish.length} tokens",
        got=f"{memory / 2**20:.2f} MiB{where}",
        remedy=remedy,
    )


def _pages(groups: Sequence[GroupLayout]) -> list[PageLayout]:
    return [g for g in groups if isinstance(g, PageLayout)]


def _window_span(group: PageLayout) -> int:
    """Blocks that one decoding sequence holds at once."""
    return -(-group.window // group.block_size) + 1


def _most_blocks(group: PageLayout, slots: int, wish: Wish) -> int:
    if not group.window:
        return 1 << 62
    return 2 * (slots * _window_span(group) + -(-wish.step_tokens // group.block_size))
