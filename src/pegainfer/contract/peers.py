"""What engines that share KV blocks tell each other: prefill for another one, blocks that are ready, the end.

decode engine                           prefill engine
Prefill ──────────────────────────────► computes the prompt, copies finished blocks to host memory
loads them ◄──────────────── Produced   … and holds them, block by block, while it computes
computes what is missing ◄───── Ended
Release ──────────────────────────────► holds nothing any more
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """To a prefill engine: compute this prompt and offer its blocks, until they are released."""

    id: str  # unique among the decode engine's live requests
    prompt: bytes  # int32 little-endian token ids
    cache_salt: str = ""
    priority: int = 0  # as in GenerateRequest
    tenant: str = ""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """To a prefill engine: the blocks of this request are not needed any more, nor is the rest of it."""

    id: str


class PeerBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block (or state) that a prefill engine offers."""

    group: int
    key: bytes  # hash of the prefix that it ends
    place: int  # its block of the prefill engine's host tier


class Produced(msgspec.Struct, frozen=True, tag="produced"):
    """From a prefill engine: these blocks can be read, and are held until the request is released."""

    id: str
    blocks: tuple[PeerBlock, ...]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """From a prefill engine, or on its behalf where it is lost: no more blocks will come."""

    id: str
    error: str | None = None


class PeerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill peer as a decode engine sees it. Totals count since the engine's start."""

    address: str
    connected: bool = False
    requests: int = 0  # prompts that it was asked to compute
    failures: int = 0  # of these, prompts that it did not finish: lost, slow, refused
    outstanding: int = 0  # prompts that it is computing
    blocks: int = 0  # read from it
    nbytes: int = 0  # of them
    seconds: float = 0.0  # of the reads, summed; reads may overlap


ToPrefill = Prefill | Release
ToDecode = Produced | Ended


class PeerSide(Protocol):
    """An engine's connections to its peers. Messages of `deliver` come from threads of its own."""

    @property
    def is_prefill(self) -> bool:
        """Whether this engine computes prompts for others, rather than asks others to."""

    def start(self, deliver: Callable[[ToPrefill | ToDecode], None]) -> None:
        """Connects or listens; `deliver` puts what peers say into the engine's inbox."""

    def send(self, message: ToPrefill | ToDecode) -> None:
        """Passes the engine's message on; never blocks for long and never raises."""

    def stats(self) -> tuple[PeerStats, ...]:
        """Of a decode engine: one for each prefill peer."""

    def close(self) -> None:
        """Ends all connections and threads."""


class PeerPolicy(Protocol):
    """What a scheduler does for an engine with peers, beside contract.step.StepPolicy."""

    def prefill_for_peer(self, message: Prefill, now: float) -> None:
        """Queues a peer's prompt; its blocks are offered as they become ready. Raises PegaError."""

    def from_peer(self, message: Release | Produced | Ended) -> None:
        """Takes a peer's message; one of a request that is unknown, or has ended, changes nothing."""

    def take_peer_messages(self) -> list[ToPrefill | ToDecode]:
        """Messages to peers since the last call."""

    def awaits_peers(self) -> bool:
        """Whether sequences wait for a peer, so that there may be work but no plan."""
