"""The control groups that this process is in, version 1 and 2, and the memory that they leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # the control groups that this process is in
MEMINFO = Path("/proc/meminfo")
# Files of limit and use, and the line of memory.stat for cached files, which the kernel can give up.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def control_groups(controller: str, cgroup: Path = CGROUP, own: Path = OWN) -> Iterator[Path]:
    """Folders of the process's own group and of those around it, as far as they can be seen.

    A container sees its own group as the root, whatever path the kernel names; a service does not.

    Args:
        controller: cpu or memory, whose version 1 hierarchy has a folder of its own.
    """
    yield from (cgroup, cgroup / controller)
    try:
        rows = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        parts = [p for p in path.split("/") if p not in ("", ".", "..")]
        yield from (root.joinpath(*parts[:n]) for n in range(1, len(parts) + 1))


def available_memory(cgroup: Path = CGROUP, own: Path = OWN, meminfo: Path = MEMINFO) -> int:
    """Bytes that the system can give without swapping, and that every control group around allows."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for row in meminfo.read_text().splitlines():
            if row.startswith("MemAvailable:"):
                free = int(row.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # another system: what the C library says
    for group in control_groups("memory", cgroup, own):
        for files in _MEMORY_FILES:
            room = _room(group, *files)
            free = free if room is None else min(free, room)
    return free


def _room(group: Path, limit: str, used: str, cached: str) -> int | None:
    """Bytes that one control group leaves; None where it sets no limit of this name."""
    try:
        most, now = int((group / limit).read_text()), int((group / used).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    try:
        rows = (row.split() for row in (group / "memory.stat").read_text().splitlines())
        now -= next((int(row[1]) for row in rows if row[0] == cached), 0)
    except (OSError, ValueError, IndexError):
        pass
    return max(0, most - max(0, now))
