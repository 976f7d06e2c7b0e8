"""Hashes from memory are those that would have been computed."""

from __future__ import annotations

import random

import pytest

from pegainfer.contract.request import hash_blocks, pack_tokens, root_hash
from pegainfer.frontend import block_hashes
from pegainfer.frontend.block_hashes import CHUNK_BLOCKS, BlockHashes

SIZE = 16
CHUNK = CHUNK_BLOCKS * SIZE  # tokens


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 16, 3 * CHUNK + 33])
@pytest.mark.parametrize("block_size", [4, 16])
def test_equal_to_hashing(length: int, block_size: int) -> None:
    tokens = pack_tokens(random.Random(length).choices(range(50_000), k=length))
    root = root_hash(None, "salt")
    hashes = BlockHashes()
    expected = b"".join(hash_blocks(tokens, block_size, parent=root))
    assert hashes.of(tokens, block_size, root) == expected
    assert hashes.of(tokens, block_size, root) == expected


def test_a_longer_prompt_is_hashed_from_where_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    r = random.Random(1)
    ids = r.choices(range(50_000), k=5 * CHUNK)
    hashed: list[int] = []

    def counting(tokens: bytes, block_size: int, *, parent: bytes) -> list[bytes]:
        out = hash_blocks(tokens, block_size, parent=parent)
        hashed.append(len(out))
        return out

    monkeypatch.setattr(block_hashes, "hash_blocks", counting)
    hashes = BlockHashes()
    root = root_hash(None, "")
    hashes.of(pack_tokens(ids[: 4 * CHUNK + 160]), SIZE, root)
    assert sum(hashed) == 4 * CHUNK_BLOCKS + 10
    hashed.clear()
    hashes.of(pack_tokens(ids[: 4 * CHUNK + 320]), SIZE, root)
    assert sum(hashed) == 20
    hashed.clear()
    hashes.of(pack_tokens(ids[: 4 * CHUNK]), SIZE, root_hash(None, "another salt"))
    assert sum(hashed) == 4 * CHUNK_BLOCKS


def test_the_memory_is_bounded() -> None:
    hashes = BlockHashes(max_bytes=20_000)
    r = random.Random(2)
    for _ in range(50):
        hashes.of(pack_tokens(r.choices(range(50_000), k=CHUNK)), SIZE, b"root")
    assert 0 < hashes._chunks.num_bytes <= 20_000
