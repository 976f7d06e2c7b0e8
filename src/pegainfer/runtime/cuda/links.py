"""How the GPUs of this machine are linked: what decides whether several ranks pay.

The driver says who can read whose memory, NVML (libnvidia-ml.so.1, which comes with the driver) which pairs
are linked by NVLink, and the kernel's sysfs which NUMA node a GPU hangs on.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pegainfer.runtime.cuda.driver import call

SYSFS = Path("/sys/bus/pci/devices")
# Of nvml.h.
OK, NVLINK_CAPS, MAX_LINKS = 0, 2, 18
LEVELS = {10: "one PCIe switch", 20: "several PCIe switches", 30: "one PCIe host bridge", 40: "one NUMA node"}


@dataclass(frozen=True)
class Link:
    """Between two GPUs.

    Args:
        path: what it passes: NVLink, or the nearest part of PCIe or of the machine that they share.
        peer: whether each can write to the other's memory.
    """

    path: str
    peer: bool

    def __str__(self) -> str:
        means = "sums over ranks pass directly" if self.peer else "no ranks: neither sees the other's memory"
        return f"{self.path}; {'peer access' if self.peer else 'no peer access'}, {means}"


def describe_links() -> list[str]:
    """A line for each kind of link with the pairs that have it, and one for the NUMA nodes; none for one GPU.

    Raises CudaError without a driver.
    """
    count = int(call("cuDeviceGetCount"))
    if count < 2:
        return []
    handles = [call("cuDeviceGet", i) for i in range(count)]
    buses = [call("cuDeviceGetPCIBusId", 32, handle).split(b"\0")[0].decode().lower() for handle in handles]
    nvml = _nvml()
    pairs: dict[Link, list[str]] = {}
    for a, b in itertools.combinations(range(count), 2):
        peer = all(call("cuDeviceCanAccessPeer", handles[i], handles[j]) for i, j in ((a, b), (b, a)))
        pairs.setdefault(Link(_path(nvml, buses[a], buses[b]), bool(peer)), []).append(f"{a}-{b}")
    whole = count * (count - 1) // 2
    lines = [f"{'all' if len(p) == whole else ' '.join(p)}: {link}" for link, p in pairs.items()]
    return [*lines, f"NUMA nodes of GPUs 0 to {count - 1}: {' '.join(map(_numa_node, buses))}"]


def _path(nvml: ctypes.CDLL | None, a: str, b: str) -> str:
    if nvml is None:
        return "links unknown (no libnvidia-ml.so.1)"
    devices = [ctypes.c_void_p() for _ in range(2)]
    for device, bus in zip(devices, (a, b), strict=True):
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(device)) != OK:
            return "links unknown (NVML does not know the GPU)"
    status = ctypes.c_uint(1)
    if nvml.nvmlDeviceGetP2PStatus(*devices, NVLINK_CAPS, ctypes.byref(status)) == OK and status.value == OK:
        return f"NVLink, {_active_links(nvml, devices[0])} links a GPU"
    level = ctypes.c_uint(1)
    if nvml.nvmlDeviceGetTopologyCommonAncestor(*devices, ctypes.byref(level)) == OK:
        return f"PCIe through {LEVELS.get(level.value, 'several NUMA nodes')}"
    return "PCIe"


def _active_links(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> int:
    active = 0
    for link in range(MAX_LINKS):
        state = ctypes.c_uint(0)
        active += nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(state)) == OK and state.value == 1
    return active


def _numa_node(bus: str) -> str:
    """The node's number; '?' where the kernel does not say."""
    try:
        node = (SYSFS / bus / "numa_node").read_text().strip()
    except OSError:
        return "?"
    return "?" if node == "-1" else node


@cache
def _nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == OK else None
