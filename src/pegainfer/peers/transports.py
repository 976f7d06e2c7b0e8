"""The transport that an address names."""

from __future__ import annotations

from pegainfer.peers.config import Address
from pegainfer.peers.transport import Shared, SharedMemory, Tcp, Transport


def transport_of(address: Address, memory: SharedMemory | None = None) -> Transport:
    """The transport of an address. Raises ConfigError where it needs a library that is not there.

    Args:
        memory: of the blocks that it sends, where that can be shared.
    """
    if address.nixl:
        from pegainfer.peers.nixl import Nixl

        return Nixl(address)
    return Shared(address, memory) if address.path else Tcp(address)
