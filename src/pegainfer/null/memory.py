"""What the null device stores: for each position of each block, the chain that a model would have left there.

Reading a stale, unwritten or wrongly shared block is therefore noticed, as is writing to a block that another
sequence, or a plan in flight, still reads.
"""

from __future__ import annotations

from collections.abc import Collection

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.request import SamplingParams
from pegainfer.contract.step import (
    NO_BLOCK,
    BlockCopy,
    KVSpec,
    NewSlot,
    PageGroup,
    StateGroup,
    StateSnapshot,
)
from pegainfer.null.model import chain_next
from pegainfer.null.transfers import Content

UNWRITTEN = -1  # no chain is negative
NOBODY = -1  # in place of a sequence's number
Uses = dict[tuple[int, int], set[int]]  # (group, block) -> sequences that a plan reads or writes it for


class NullSlot:
    """A sequence on the device."""

    def __init__(self, new: NewSlot, tokens: list[int], num_groups: int, start: int) -> None:
        """`start`: the chain before any token."""
        self.seq = new.seq
        self.num_prompt = new.num_prompt
        self.sampling: SamplingParams = new.sampling
        self.seed = new.seed
        self.adapter = new.adapter
        self.mask_tokens = new.mask_tokens
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.tokens: list[int] = []
        self.chains: list[int] = []
        self.next: int | None = None  # where the next row must start; None before the first
        self._start = start
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.chains.append(chain_next(self.chains[-1] if self.chains else self._start, token))

    def chain_at(self, position: int) -> int:
        """The chain after so many tokens."""
        return self.chains[position - 1] if position else self._start


class NullMemory:
    """Contents of all groups' blocks, with the checks of every access."""

    def __init__(self, spec: KVSpec, num_blocks: tuple[int, ...]) -> None:
        self.groups = spec.groups
        # Whether all of a table is in use: a window group still names blocks that left the window.
        self._whole = tuple(isinstance(group, StateGroup) or not group.window for group in spec.groups)
        self._states_of = tuple(g for g, group in enumerate(spec.groups) if isinstance(group, StateGroup))
        self.num_blocks = num_blocks
        self._pages: list[dict[int, list[int]]] = [{} for _ in spec.groups]
        self._states: list[dict[int, tuple[int, int]]] = [{} for _ in spec.groups]
        self._owners: list[dict[int, set[int]]] = [{} for _ in spec.groups]
        self.moving: Collection[tuple[int, int]] = ()  # (group, block) that transfers in flight hold

    def attach(self, slot: NullSlot, g: int, blocks: tuple[int, ...]) -> None:
        """Appends blocks to a slot's table."""
        group, table = self.groups[g], slot.tables[g]
        for block in blocks:
            if block == NO_BLOCK:
                if not isinstance(group, PageGroup) or not group.window or any(b != NO_BLOCK for b in table):
                    raise InvariantError(
                        f"group {g}: NO_BLOCK must stand at the start of a window group's table"
                    )
            elif not 0 <= block < self.num_blocks[g] or (self._whole[g] and block in table):
                raise InvariantError(f"group {g}: block {block} does not exist or stands twice in a table")
            else:
                self._owners[g].setdefault(block, set()).add(slot.seq)
            table.append(block)
        if isinstance(group, StateGroup) and len(table) != 1:
            raise InvariantError(f"group {g}: a slot has one state, got {table}")

    def detach(self, slot: NullSlot) -> None:
        """The slot owns its tables' blocks no more."""
        for g, table in enumerate(slot.tables):
            for block in table:
                if block != NO_BLOCK:
                    self._owners[g][block].discard(slot.seq)

    def reach(self, slot: NullSlot) -> int:
        """Positions that the slot's tables cover; a large number without page groups."""
        sizes = [
            len(slot.tables[g]) * p.block_size for g, p in enumerate(self.groups) if isinstance(p, PageGroup)
        ]
        return min(sizes, default=1 << 62)

    def copy(self, copy: BlockCopy, target: int, uses: Uses, in_flight: list[Uses]) -> None:
        """One block or state; what lies in the source is checked when it is read.

        `target`: the sequence that gets the copy.
        """
        g, src, dst = copy.group, copy.src, copy.dst
        if self._whole[g]:
            uses.setdefault((g, src), set()).update(self._owners[g].get(src) or {NOBODY})
            if self._owners[g].get(dst, set()) - {target}:
                raise InvariantError(f"group {g}: copy to block {dst}, which another sequence owns")
        if any(used.get((g, dst), set()) - {target} for used in in_flight):
            raise InvariantError(f"group {g}: copy to block {dst} while a plan in flight uses it")
        self._check_still(g, dst)
        uses.setdefault((g, dst), set()).add(target)
        if isinstance(self.groups[g], StateGroup):
            if src not in self._states[g]:
                raise InvariantError(f"group {g}: copy of state {src}, which was never written")
            self._states[g][dst] = self._states[g][src]
        elif src not in self._pages[g]:
            raise InvariantError(f"group {g}: copy of block {src}, which was never written")
        else:
            self._pages[g][dst] = list(self._pages[g][src])

    def read(self, slot: NullSlot, start: int, uses: Uses) -> None:
        """Checks all that computing position `start` reads from earlier steps."""
        for g, group in enumerate(self.groups):
            if isinstance(group, StateGroup):
                state = slot.tables[g][0]
                uses.setdefault((g, state), set()).add(slot.seq)
                expected = (start, slot.chain_at(start))
                if start and self._states[g].get(state) != expected:
                    raise InvariantError(
                        f"group {g}: state {state} of sequence {slot.seq} should be as of {start} tokens, "
                        f"holds {self._states[g].get(state)}"
                    )
                continue
            size, table = group.block_size, slot.tables[g]
            low = max(0, start - group.window + 1) if group.window else 0
            for i in range(low // size, -(-start // size)):
                first, stop = max(low, i * size), min(start, (i + 1) * size)
                block = table[i] if i < len(table) else NO_BLOCK
                have = self._pages[g].get(block, [])[first - i * size : stop - i * size]
                if have != slot.chains[first:stop]:
                    raise InvariantError(
                        f"group {g}: sequence {slot.seq} reads positions {first}..{stop - 1} "
                        f"from block {block}, which holds something else"
                    )
                uses.setdefault((g, block), set()).add(slot.seq)

    def write(self, slot: NullSlot, start: int, chains: list[int], uses: Uses, in_flight: list[Uses]) -> None:
        """Writes one chain a position from `start` on; the blocks must be the slot's own."""
        for g, group in enumerate(self.groups):
            if isinstance(group, StateGroup):
                continue
            size, table = group.block_size, slot.tables[g]
            for position, chain in enumerate(chains, start):
                if position // size >= len(table):
                    raise InvariantError(
                        f"group {g}: sequence {slot.seq} has no block for position {position}"
                    )
                block = table[position // size]
                if position == start or position % size == 0:
                    self._check_private(g, block, slot, in_flight)
                    uses.setdefault((g, block), set()).add(slot.seq)
                page = self._pages[g].setdefault(block, [UNWRITTEN] * size)
                page[position % size] = chain

    def write_state(self, slot: NullSlot, position: int, in_flight: list[Uses]) -> None:
        """The slot's states now stand for its first `position` tokens."""
        for g in self._states_of:
            state = slot.tables[g][0]
            self._check_private(g, state, slot, in_flight)
            self._states[g][state] = (position, slot.chain_at(position))

    def snapshot(self, slot: NullSlot, wanted: StateSnapshot, uses: Uses, in_flight: list[Uses]) -> None:
        """Keeps the slot's state as of `wanted.position` tokens in another state of the pool."""
        g, state = wanted.group, wanted.state
        if not isinstance(self.groups[g], StateGroup) or not 0 <= state < self.num_blocks[g]:
            raise InvariantError(f"group {g}: {wanted} names no state")
        if self._owners[g].get(state):
            raise InvariantError(f"group {g}: snapshot to state {state}, which a sequence owns")
        if any(used.get((g, state), set()) - {NOBODY} for used in in_flight):
            raise InvariantError(f"group {g}: snapshot to state {state} while a plan in flight uses it")
        self._check_still(g, state)
        uses.setdefault((g, state), set()).add(NOBODY)
        self._states[g][state] = (wanted.position, slot.chain_at(wanted.position))

    def content(self, g: int, block: int) -> Content:
        """A copy of what a block or state holds; None where it was never written."""
        if isinstance(self.groups[g], StateGroup):
            return self._states[g].get(block)
        page = self._pages[g].get(block)
        return None if page is None else list(page)

    def expect(self, g: int, block: int, in_flight: list[Uses]) -> None:
        """A transfer will fill the block; until then it holds nothing that may be read."""
        owned = self._whole[g] and self._owners[g].get(block)
        if owned or any(used.get((g, block)) for used in in_flight):
            raise InvariantError(f"group {g}: block {block} is the target of a transfer, but in use")
        self._pages[g].pop(block, None)
        self._states[g].pop(block, None)

    def land(self, g: int, block: int, content: Content) -> None:
        """A transfer has filled the block."""
        if isinstance(content, tuple):
            self._states[g][block] = content
        elif content is not None:
            self._pages[g][block] = list(content)

    def _check_still(self, g: int, block: int) -> None:
        if (g, block) in self.moving:
            raise InvariantError(f"group {g}: block {block} is overwritten while a transfer holds it")

    def _check_private(self, g: int, block: int, slot: NullSlot, in_flight: list[Uses]) -> None:
        if self.moving:
            self._check_still(g, block)
        if block == NO_BLOCK or (self._whole[g] and self._owners[g][block] != {slot.seq}):
            raise InvariantError(
                f"group {g}: sequence {slot.seq} writes to block {block}, which is not its own"
            )
        for used in in_flight:
            if used.get((g, block), set()) - {slot.seq}:
                raise InvariantError(
                    f"group {g}: block {block} is overwritten while a plan in flight uses it"
                )
