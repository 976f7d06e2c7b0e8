"""What a line declares of its KV groups, and the pools that are made from it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import BlockCopy, PageGroup, StateGroup
from pegainfer.kv.device.cuda_pool import CudaPools
from pegainfer.kv.device.layout import PageLayout, Part, StateLayout, block_bytes, kv_spec
from pegainfer.kv.device.pool import HostPools
from pegainfer.runtime.cuda.device import Device
from pegainfer.runtime.cuda.stream import Stream
from tests.support.fake_cuda import fake_cuda

PAGES = PageLayout("kv", (Part("kv", (2, 3), "f16"),), block_size=16)
NEAR = PageLayout("near", (Part("near", (5,), "f32"),), block_size=8, window=128)
STATES = StateLayout("gdn", (Part("delta", (2, 2), "f32"), Part("conv", (3,), "f16")), snapshot_every=64)


def test_the_scheduler_sees_sizes_in_bytes() -> None:
    assert kv_spec((PAGES, NEAR, STATES)).groups == (
        PageGroup(name="kv", block_size=16, bytes_per_block=12),
        PageGroup(name="near", block_size=8, bytes_per_block=20, window=128),
        StateGroup(name="gdn", bytes_per_state=16 + 6, snapshot_every=64),
    )
    assert [block_bytes(g) for g in (PAGES, NEAR, STATES)] == [12, 20, 22]


def test_formats_of_less_than_a_byte() -> None:
    assert Part("kv", (4, 64), "q8_0").nbytes == 4 * 2 * 34


def test_names_are_distinct() -> None:
    with pytest.raises(ConfigError, match=r"KV groups share a name; expected distinct names; got kv kv"):
        kv_spec((PAGES, PageLayout("kv", (Part("other", (1,), "f32"),), 16)))
    with pytest.raises(ConfigError, match="KV parts share a name"):
        kv_spec((PAGES, StateLayout("state", (Part("kv", (1,), "f32"),))))


def test_host_pools_copy_every_part_of_a_block_in_order() -> None:
    pools = HostPools((PAGES, STATES), (4, 5))
    assert {n: (a.shape, a.dtype) for n, a in pools.states.items()} == {
        "kv": ((4, 2, 3), np.float16),
        "delta": ((5, 2, 2), np.float32),
        "conv": ((5, 3), np.float16),
    }
    assert not any(a.any() for a in pools.states.values())
    pools.states["kv"][0] = 1
    pools.states["delta"][4], pools.states["conv"][4] = 2, 3
    pools.copy((BlockCopy(0, 0, 2), BlockCopy(0, 2, 3), BlockCopy(1, 4, 0)))
    assert pools.states["kv"][:, 0, 0].tolist() == [1, 0, 1, 1]
    assert pools.states["delta"][:, 0, 0].tolist() == [2, 0, 0, 0, 2]
    assert pools.states["conv"][:, 0].tolist() == [3, 0, 0, 0, 3]


def test_host_pools_of_another_format() -> None:
    with pytest.raises(
        ConfigError, match="no such KV format; expected f32 or f16 or bf16 or f8_e4m3; got q8_0"
    ):
        HostPools((PageLayout("kv", (Part("kv", (1,), "q8_0"),), 16),), (1,))


def test_memory_that_cannot_be_reserved() -> None:
    with pytest.raises(ConfigError, match=r"cannot reserve memory for the KV cache.*lower kv_cache_memory"):
        HostPools((PAGES,), (1 << 60,))


def test_cuda_pools_copy_every_part_of_a_block() -> None:
    with fake_cuda():
        Device.open(0)
        stream = Stream()
        pools = CudaPools((PAGES, STATES), (4, 5))
        for name, value in (("delta", 2), ("conv", 3)):
            part = pools.states[name]
            each = part.nbytes // 5
            ctypes.memset(part.address, 0, part.nbytes)
            ctypes.memset(part.address + 4 * each, value, each)
        pools.copy((BlockCopy(1, 4, 1), BlockCopy(1, 1, 0)), stream)
        for name, value in (("delta", 2), ("conv", 3)):
            part = pools.states[name]
            each = part.nbytes // 5
            data = ctypes.string_at(part.address, part.nbytes)
            assert data == bytes([value]) * each * 2 + bytes(each * 2) + bytes([value]) * each
