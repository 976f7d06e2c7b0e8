"""Block hashes of prompts, kept by what they stand for: an agent's next prompt begins with its last one."""

from __future__ import annotations

import threading

from pegainfer.contract.request import HASH_BYTES, hash_blocks
from pegainfer.frontend.recent import Recent

CHUNK_BLOCKS = 64  # hashed and found together: one look-up instead of 64 SHA-256
MAX_BYTES = 16 << 20  # of chunks and hashes in memory: some 40,000 blocks
_OVERHEAD = 250  # bytes: the objects of one entry


class BlockHashes:
    """`hash_blocks` for whole prompts. Safe to share among threads.

    A chunk is found by the hash before it and its tokens, both compared in full, so that what is found is
    what would have been computed.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._lock = threading.Lock()
        self._chunks: Recent[tuple[bytes, bytes], bytes] = Recent(max_bytes, _size)

    def of(self, tokens: bytes, block_size: int, root: bytes) -> bytes:
        """The joined hashes of all full blocks.

        Args:
            tokens: int32 little-endian ids.
            block_size: tokens a block.
            root: the chain's start.
        """
        stride = 4 * block_size * CHUNK_BLOCKS
        full = len(tokens) // (4 * block_size)
        parts: list[bytes] = []
        parent = root
        for i in range(full // CHUNK_BLOCKS):
            chunk = tokens[i * stride : (i + 1) * stride]
            parts.append(self._chunk(parent, chunk, block_size))
            parent = parts[-1][-HASH_BYTES:]
        rest = tokens[full // CHUNK_BLOCKS * stride :]
        parts += hash_blocks(rest, block_size, parent=parent)
        return b"".join(parts)

    def _chunk(self, parent: bytes, chunk: bytes, block_size: int) -> bytes:
        key = (parent, chunk)
        with self._lock:
            found = self._chunks.get(key)
        if found is not None:
            return found
        hashes = b"".join(hash_blocks(chunk, block_size, parent=parent))
        with self._lock:
            self._chunks.put(key, hashes)
        return hashes


def _size(key: tuple[bytes, bytes], hashes: bytes) -> int:
    return len(key[0]) + len(key[1]) + len(hashes) + _OVERHEAD
