"""The CPU's ceilings, measured on the threads and vectors that the kernels use (csrc/roofline.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pegainfer.kernels.cpu.library import kernels, library
from pegainfer.lower.cpu.threads import ThreadPool
from pegainfer.measure.ledger import Roofline

LEAST_BYTES, MOST_BYTES = 128 << 20, 1 << 30  # of the array that is read from memory
CACHE_BYTES = 256 << 10  # a thread's own, small enough for any second-level cache
CACHE_TIMES = 64
ROUNDS = 100_000  # 12 instructions each: a third of a millisecond
NUMBERS = {"f32": 0, "int8": 1, "bf16": 2}  # csrc/roofline.cpp: Numbers
RUNS = 9  # the best counts: whatever else runs on the machine can only slow it down
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def last_level_cache(caches: Path = CACHES) -> int:
    """Bytes of the largest cache that the system reports; 32 MiB where it reports none."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = []
    for path in caches.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) * units.get(text[-1:], 1))
    return max(sizes, default=32 << 20)


def measure_roofline(threads: int = 0, isa: str | None = None) -> Roofline:
    """Takes about half a second. `threads` and `isa` as in CpuOptions; no program may run meanwhile.

    Without a peak for bf16 these kernels do not multiply it.
    """
    lib, table, pool = library(), kernels(isa), ThreadPool(threads)

    def read(nbytes: int, times: int) -> float:
        data = np.ones(nbytes, np.uint8)
        return _best(lambda: lib.pega_roofline_read(pool.handle, table, data.ctypes.data, nbytes, times))

    def compute(numbers: str) -> float:
        code = NUMBERS[numbers]
        return _best(lambda: lib.pega_roofline_compute(pool.handle, table, code, ROUNDS))

    try:
        return Roofline(
            read_gb_s=read(min(max(LEAST_BYTES, 4 * last_level_cache()), MOST_BYTES), 1),
            cache_gb_s=read(CACHE_BYTES * pool.threads, CACHE_TIMES),
            peaks={name: peak for name in NUMBERS if (peak := compute(name))},
        )
    finally:
        pool.close()


def _best(measure: Callable[[], float]) -> float:
    return round(max(measure() for _ in range(RUNS)), 1)
