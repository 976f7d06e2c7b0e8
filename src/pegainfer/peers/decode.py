"""The decode engine's side: has prefill engines compute prompts, and reads the blocks that they produce.

    the engine ─► Prefill, Release ─► the peer that has least to do;  Produced, Ended ─► the engine
    transfers ─► PeerStore.read ─► a connection of their own to the peer that has the block

If a peer is lost, or says nothing of a request for too long, its part of the request has ended: the engine
then computes the missing blocks itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from pegainfer.contract.errors import EngineDeadError
from pegainfer.contract.peers import PeerStats, Prefill, Produced, Release, ToDecode, ToPrefill
from pegainfer.kv.device.store import Allocate, Bytes, StoreError, Use, reserve
from pegainfer.peers.config import Address, PeerOptions
from pegainfer.peers.peer import Peer


class DecodeSide:
    """Implements PeerSide for a decode engine."""

    is_prefill = False

    def __init__(self, addresses: Sequence[Address], options: PeerOptions) -> None:
        self._lock = threading.Lock()
        self._owners: dict[str, Peer] = {}  # by request
        self._sources: dict[tuple[int, bytes], dict[str, Peer]] = {}  # (group, key) -> by request
        self._keys: dict[str, list[tuple[int, bytes]]] = {}  # by request
        self._peers = [Peer(address, options, self._heard) for address in addresses]
        self._deliver: Callable[[ToPrefill | ToDecode], None] = lambda message: None

    def start(self, deliver: Callable[[ToPrefill | ToDecode], None]) -> None:
        self._deliver = deliver
        for peer in self._peers:
            peer.start()

    def send(self, message: ToPrefill | ToDecode) -> None:
        if isinstance(message, Prefill):
            best = min(self._peers, key=lambda peer: peer.load)
            with self._lock:
                self._owners[message.id] = best
                self._keys[message.id] = []
            best.ask(message)
        elif isinstance(message, Release):
            with self._lock:
                peer = self._owners.pop(message.id, None)
                for key in self._keys.pop(message.id, ()):
                    of_requests = self._sources.get(key, {})
                    of_requests.pop(message.id, None)
                    if not of_requests:
                        self._sources.pop(key, None)
            if peer is not None:
                peer.release(message)

    def stats(self) -> tuple[PeerStats, ...]:
        return tuple(peer.stats() for peer in self._peers)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def _heard(self, peer: Peer, message: ToDecode) -> None:
        """A peer's message, on its thread."""
        if isinstance(message, Produced):
            with self._lock:
                if self._owners.get(message.id) is not peer:
                    return
                for block in message.blocks:
                    key = block.group, block.key
                    self._sources.setdefault(key, {})[message.id] = peer
                    self._keys[message.id].append(key)
        with contextlib.suppress(EngineDeadError):
            self._deliver(message)

    def read(self, group: int, key: bytes, out: Bytes) -> None:
        """Fills `out` with a block that a peer has produced. Raises StoreError."""
        with self._lock:
            source = next(iter(self._sources.get((group, key), {}).items()), None)
        if source is None:
            raise StoreError("no peer has the block any more", where=f"group {group}")
        request_id, peer = source
        peer.fetch(request_id, group, key, out)


class PeerStore:
    """Implements BlockStore over what peers have produced: blocks are found by their keys alone."""

    buffered = True

    def __init__(self, side: DecodeSide, block_bytes: Sequence[int], allocate: Allocate = reserve) -> None:
        """
        Args:
            block_bytes: by KV group.
            allocate: makes the buffers that blocks pass through.
        """
        self._side = side
        self._block_bytes = block_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._spare: list[list[Bytes]] = [[] for _ in block_bytes]

    def write(self, group: int, block: int, key: bytes, fill: Use) -> None:
        raise StoreError("blocks are not written to peers")

    def read(self, group: int, block: int, key: bytes, use: Use) -> None:
        with self._lock:
            spare = self._spare[group]
            buffer = spare.pop() if spare else None
        if buffer is None:
            buffer = self._allocate(self._block_bytes[group])
        try:
            self._side.read(group, key, buffer)
            use(buffer)
        finally:
            with self._lock:
                self._spare[group].append(buffer)

    def forget(self, group: int, block: int) -> None:
        """Nothing was written."""

    def reset(self) -> None:
        """The bookkeeping does not find peers' blocks any more."""

    def stop_waiting(self) -> None:
        self._side.close()

    def close(self) -> None:
        """The buffers go with the store."""
