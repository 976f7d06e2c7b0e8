"""What the scheduler does with other engines: prompts that a peer prefills, and prompts of peers.

queued ─► Prefill to a peer ─► LOADING: blocks that are ready are loaded meanwhile ─► queued again ─► Release
a peer's prompt ─► a request for one token ─► its blocks are offered as they are ready, until Release

A sequence whose peer is lost or slow computes what it lacks. Nothing here depends on a peer's word: a block
that cannot be read any more is a failed load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from pegainfer.contract.errors import RequestError
from pegainfer.contract.peers import Ended, PeerBlock, Prefill, Produced, Release, ToDecode, ToPrefill
from pegainfer.contract.request import HASH_BYTES, GenerateRequest, SamplingParams
from pegainfer.contract.step import RunnerInfo
from pegainfer.engine.batch import Batch
from pegainfer.engine.residents import Residents
from pegainfer.engine.sequence import PeerWait, Sequence, Status

if TYPE_CHECKING:
    from pegainfer.kv.exports import Export

REQUEST_PREFIX = "peer/"  # of the ids of requests that prefill for peers


class _Served(msgspec.Struct, eq=False):
    """A peer's prompt."""

    seq: Sequence
    export: Export
    ended: bool = False  # the message that no more blocks come has been sent


class Peering:
    """Implements contract.peers.PeerPolicy. Mutates pools, batches and queues."""

    def __init__(
        self,
        residents: Residents,
        info: RunnerInfo,
        min_tokens: int,
        add: Callable[[GenerateRequest, float], Any],
        cancel: Callable[[str], None],
        live: dict[str, list[Sequence]],
    ) -> None:
        """
        Args:
            min_tokens: no peer is asked for a prompt of which fewer tokens are missing.
            add, cancel, live: of the scheduler.
        """
        self._residents = residents
        self._min_tokens = min_tokens
        self._add, self._cancel, self._live = add, cancel, live
        self._home = residents.homes[0]
        self._tiers = self._home.kv.tiers
        kinds = [tier.kind for tier in info.tiers]
        self._asks = "peer" in kinds and self._tiers is not None
        self._serves = kinds[:1] == ["host"] and self._tiers is not None
        self._waits: dict[str, tuple[Sequence, PeerWait]] = {}  # by the id of the request to the peer
        self._offered: Counter[tuple[int, bytes]] = Counter()  # peers' offers by group and key
        self._served: dict[str, _Served] = {}
        self._out: list[ToPrefill | ToDecode] = []

    def take_peer_messages(self) -> list[ToPrefill | ToDecode]:
        out, self._out = self._out, []
        return out

    def from_peer(self, message: Release | Produced | Ended) -> None:
        if isinstance(message, Release):
            self._release(message.id)
            return
        _, wait = self._waits.get(message.id, (None, None))
        if wait is None or wait.ended:
            return
        if isinstance(message, Produced):
            groups = len(self._home.kv.groups)
            blocks = [b for b in message.blocks if b.group in range(groups) and len(b.key) == HASH_BYTES]
            wait.blocks += blocks
            self._offered.update((b.group, b.key) for b in blocks)
            if self._tiers is not None:
                self._tiers.offer(blocks)
        else:
            wait.ended = True
        wait.fresh = True

    # For sequences that a peer prefills

    def queue(self, seq: Sequence) -> None:
        """Asks for the prefix of a sequence that was just queued, where enough of it is missing."""
        if not self._asks or not seq.may_use_prefix or seq.adapter is not None:
            return
        kv, target = self._home.kv, seq.target
        cached = kv.cached_tokens(seq.hashes, target, kv.find(seq.hashes, target))
        if (target - 1) // kv.stride * kv.stride - cached < self._min_tokens:
            return
        self._residents.set_aside(seq)
        seq.peer = PeerWait()
        request = seq.request
        self._waits[str(seq.number)] = seq, seq.peer
        self._out.append(
            Prefill(str(seq.number), request.prompt, request.cache_salt, request.priority, request.tenant)
        )

    def pull(self, batch: Batch) -> None:
        """Loads what peers have ready; sequences whose peer has ended are queued again."""
        for wait_id, (seq, wait) in list(self._waits.items()):
            if seq.status in (Status.RUNNING, Status.FINISHED):
                self._drop(wait_id, wait)
            elif seq.peer is not None and not wait.loading:
                if wait.fresh:
                    wait.fresh = False
                    wait.loading = self._residents.tiering.pull(seq, self._residents.watermark, batch)
                if wait.ended and not wait.loading:
                    seq.peer = None
                    self._residents.queue_again([seq], holds_adapter=False)

    def _drop(self, wait_id: str, wait: PeerWait) -> None:
        """The peer's blocks are not needed any more."""
        del self._waits[wait_id]
        self._out.append(Release(wait_id))
        gone: list[PeerBlock] = []
        for block in wait.blocks:
            self._offered[block.group, block.key] -= 1
            if not self._offered[block.group, block.key]:
                del self._offered[block.group, block.key]
                gone.append(block)
        if self._tiers is not None:
            self._tiers.withdraw(gone)

    def awaits_peers(self) -> bool:
        return any(seq.peer is not None for seq, _ in self._waits.values())

    def reset(self) -> None:
        """The prefix cache was reset: what peers offered before is not used any more."""
        for seq, wait in self._waits.values():
            wait.ended = True
            if seq.peer is not None:
                wait.fresh = False

    # For peers

    def prefill_for_peer(self, message: Prefill, now: float) -> None:
        if not self._serves or self._tiers is None:
            raise RequestError("this engine has no host tier to offer blocks from", remedy="--kv-offload")
        request_id = REQUEST_PREFIX + message.id
        # Its one token is nobody's: the peer computes the last position itself.
        request = GenerateRequest(
            id=request_id,
            prompt=message.prompt,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            cache_salt=message.cache_salt,
            priority=message.priority,
            tenant=message.tenant,
        )
        self._add(request, now)
        (seq,) = self._live[request_id]
        export = self._tiers.exports.open(seq.hashes, seq.num_prompt, self._home.kv.stride)
        self._served[message.id] = _Served(seq, export)

    def serve(self) -> None:
        """Offers what has become ready. Before each round of saves, and after it for what was not saved."""
        for served_id, served in self._served.items():
            if served.ended or self._tiers is None:
                continue
            seq = served.seq
            finished = seq.status is Status.FINISHED
            published = 0 if seq.kv is None else seq.kv.published * self._home.kv.unit
            blocks = self._tiers.exports.advance(served.export, seq.computed if finished else published)
            if blocks:
                self._out.append(Produced(served_id, tuple(blocks)))
            if finished and not served.export.copying:
                served.ended = True
                self._out.append(Ended(served_id))

    @property
    def is_pending(self) -> bool:
        """Whether a peer waits for blocks that are being copied, or messages wait to be made."""
        done = (Status.RUNNING, Status.FINISHED)
        return any(not served.ended for served in self._served.values()) or any(
            seq.status in done for seq, _ in self._waits.values()
        )

    def _release(self, served_id: str) -> None:
        served = self._served.pop(served_id, None)
        if served is not None and self._tiers is not None:
            self._tiers.exports.close(served.export)
            if served.seq.status is not Status.FINISHED:
                self._cancel(served.seq.request_id)
