"""Device time of a step by kernel: where a slow step spends its time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from pegainfer.lower.cuda.bind import Matmul, Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.measure.cuda.timing import graph_times
from pegainfer.runtime.cuda.launch import Launch


@dataclass(frozen=True)
class KernelShare:
    """Launches of one kernel in a step. `us`: microseconds of all of them together."""

    kernel: str
    count: int
    us: float

    def __str__(self) -> str:
        return f"{self.kernel:44} {self.count:4} x {self.us / self.count:9.2f} us = {self.us:10.1f} us"


def kernel_shares(ctx: CudaContext, work: Iterable[Work], repeats: int = 5) -> list[KernelShare]:
    """The kernels of a step that has run, the dearest first.

    All launches of a kernel are replayed together, in a graph of their own, so that each reads the memory
    that it reads in a step. Their sum differs from the step's time, in which kernels overlap.
    """
    groups: dict[str, list[Work]] = {}
    for launch in work:
        groups.setdefault(_name(launch), []).append(launch)
    found = [
        KernelShare(name, len(same), statistics.median(graph_times(ctx, same, repeats, name)))
        for name, same in groups.items()
    ]
    return sorted(found, key=lambda share: -share.us)


def _name(work: Work) -> str:
    if isinstance(work, Launch):
        return work.kernel.name
    return "cuBLASLt" if isinstance(work, Matmul) else type(work).__name__
