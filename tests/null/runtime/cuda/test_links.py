"""How GPUs are linked, by a driver and an NVML without GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegainfer.runtime.cuda import links
from pegainfer.runtime.cuda.links import describe_links
from tests.support.fake_cuda import FakeCuda, fake_cuda


class FakeNvml:
    """NVLink between GPUs of the same half, six links each; PCIe between the halves."""

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, device: Any) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = 1 + int(bus[5:7], 16)
        return 0

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, index: int, status: Any) -> int:
        assert index == 2, "NVLink"
        _set(status, int((a.value - 1) // 2 != (b.value - 1) // 2))
        return 0

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int, state: Any) -> int:
        _set(state, 1)
        return 0 if link < 6 else 2

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Any, b: Any, level: Any) -> int:
        _set(level, 50)
        return 0


def _set(pointer: Any, value: int) -> None:
    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint))[0] = value


@pytest.fixture
def numa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for gpu, node in enumerate(("0", "0", "1", "-1")):
        folder = tmp_path / f"0000:{gpu:02x}:00.0"
        folder.mkdir()
        (folder / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(links, "SYSFS", tmp_path)
    yield


def test_pairs_are_grouped_by_their_link(numa: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_nvml", FakeNvml)
    with fake_cuda(FakeCuda(devices=4)):
        assert describe_links() == [
            "0-1 2-3: NVLink, 6 links a GPU; peer access, sums over ranks pass directly",
            "0-2 0-3 1-2 1-3: PCIe through several NUMA nodes; no peer access, no ranks: neither sees the "
            "other's memory",
            "NUMA nodes of GPUs 0 to 3: 0 0 1 ?",
        ]


def test_without_nvml_the_driver_still_says_who_sees_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_nvml", lambda: None)
    with fake_cuda(FakeCuda(devices=2)):
        assert describe_links() == [
            "all: links unknown (no libnvidia-ml.so.1); peer access, sums over ranks pass directly",
            "NUMA nodes of GPUs 0 to 1: ? ?",
        ]


def test_one_gpu_has_no_links() -> None:
    with fake_cuda(FakeCuda(devices=1)):
        assert describe_links() == []
