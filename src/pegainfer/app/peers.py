"""Makes a prefill or decode engine's connections from its configuration."""

from __future__ import annotations

from pegainfer.app.config import EngineConfig
from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device.store import BlockStore
from pegainfer.peers.config import PeerOptions, parse_address, read_secret
from pegainfer.peers.decode import DecodeSide
from pegainfer.peers.prefill import PrefillSide
from pegainfer.peers.transport import SharedMemory


def shared_memory(config: EngineConfig) -> SharedMemory | None:
    """Memory for a host tier that engines on this host map; None where there is no use for it."""
    shares = config.role == "prefill" and parse_address(config.peer_listen, "peer_listen").path
    return SharedMemory() if shares else None


def prefill_side(
    config: EngineConfig, digest: bytes, store: BlockStore, memory: SharedMemory | None
) -> PrefillSide:
    """Listens for decode engines. Raises ConfigError.

    Args:
        digest: of what the bytes of a block depend on.
        store: of the host tier, which keeps its blocks in `memory` if that is given.
    """
    address = parse_address(config.peer_listen, "peer_listen")
    options = PeerOptions(digest, read_secret(config.peer_secret_file, [address]), config.peer_timeout)
    return PrefillSide(address, options, store, memory)


def decode_side(config: EngineConfig, digest: bytes) -> DecodeSide:
    """Raises ConfigError. `digest`: of what the bytes of a block depend on."""
    texts = [text.strip() for text in config.prefill_peers.split(",")]
    addresses = [parse_address(text, "prefill_peers") for text in texts if text]
    if not addresses or len(set(addresses)) < len(addresses):
        raise ConfigError(
            "bad addresses of prefill engines", expected="one or more, none twice", got=config.prefill_peers,
            where="prefill_peers",
        )  # fmt: skip
    options = PeerOptions(digest, read_secret(config.peer_secret_file, addresses), config.peer_timeout)
    return DecodeSide(addresses, options)
