"""Memory that requests took and left behind: kept low while serving, given back while nothing is asked.

The C library's malloc keeps what was freed. With an arena a thread, and requests of all sizes, that grows to
a multiple of what is in use.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

from pegainfer.frontend.http.answer.registry import Registry
from pegainfer.frontend.http.observation.metrics import FrontMetrics

IDLE_SECONDS = 2.0  # without a request, until memory is given back
ARENAS = 2
_M_ARENA_MAX = -8  # malloc.h of glibc
# Objects until the garbage collector looks at the young, and how many looks until it takes the older ones in.
COLLECT_AFTER = (20_000, 20, 50)


def spare_the_collector() -> None:
    """Keeps pauses of the garbage collector off the event loop.

    What was made until now stays for good and is not looked at again, which took 10 to 50 ms each time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()  # a server starts without it
    gc.set_threshold(*COLLECT_AFTER)


def limit_arenas() -> None:
    """Lets all threads share a few of malloc's arenas; call it before there are many threads.

    Python's threads hold one lock most of the time, so that arenas of their own would gain them nothing.
    """
    mallopt = _libc_function("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS)


async def give_back_when_idle(registry: Registry, metrics: FrontMetrics) -> None:
    """After each busy time, once nothing was asked for `IDLE_SECONDS`, frees what can be. Until cancelled."""
    trim = _libc_function("malloc_trim")
    done = registry.busy_since
    while True:
        await registry.idle.wait()
        busy_since = registry.busy_since
        await asyncio.sleep(IDLE_SECONDS)
        if registry.live or registry.busy_since != busy_since or busy_since == done:
            continue
        done = busy_since
        gc.collect()
        if trim is not None:
            await asyncio.to_thread(trim, 0)
        metrics.memory_trims += 1


def _libc_function(name: str) -> Callable[..., int] | None:
    """One that glibc has, and other C libraries may not."""
    return getattr(ctypes.CDLL(None), name, None)
