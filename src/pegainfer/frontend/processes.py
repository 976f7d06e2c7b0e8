"""The processes of a server and the memory that they hold, read from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


def process_family(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    found = [pid]
    for each in found:
        for file in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, file.read_text().split())
    return found


def memory_of(pids: Sequence[int]) -> int:
    """Bytes that the processes hold, with what several of them share counted once (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def resident_bytes(pids: Sequence[int]) -> int:
    """Bytes resident in the processes' memory. Cheap, but a page that several share counts in each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
