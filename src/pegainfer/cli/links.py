"""How fast KV blocks move on this machine: in memory, to and from a disk tier, over the GPU's bus."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pegainfer.contract.errors import ConfigError

COPY_BYTES = 256 << 20  # beyond any last-level cache share of a small machine
COPY_RUNS = 3
RECORD_BYTES = (4 << 20) - 4096  # of content: a record of the disk tier is then 4 MiB
RECORDS = 64  # 256 MiB of a disk


def copy_bandwidth() -> float:
    """Best GB/s (10⁹ bytes) at which one thread copies memory; each byte counts once."""
    import numpy as np

    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    return _best(lambda: np.copyto(target, source))


def disk_bandwidth(folder: Path) -> tuple[float, float]:
    """GB/s at which a disk tier in `folder` writes and reads records, checksums included, with its threads.

    The records go to a temporary folder inside, which needs 256 MiB. Raises ConfigError, StoreError.
    """
    import numpy as np

    from pegainfer.kv.device.disk import DiskStore
    from pegainfer.kv.device.transfers import DISK_THREADS

    if not folder.is_dir():
        raise ConfigError("no such folder", got=str(folder), remedy="create it, or name another one")
    try:
        with tempfile.TemporaryDirectory(prefix="pegainfer-doctor-", dir=folder) as inside:
            store = DiskStore(Path(inside), bytes(32), [RECORD_BYTES], [RECORDS])
            content = np.frombuffer(os.urandom(1 << 20) * 4, np.uint8)[:RECORD_BYTES]

            def write(block: int) -> None:
                store.write(0, block, block.to_bytes(32, "big"), lambda out: np.copyto(out, content))

            def read(block: int) -> None:
                store.read(0, block, block.to_bytes(32, "big"), lambda data: None)

            try:
                with ThreadPoolExecutor(DISK_THREADS) as threads:
                    rates = []
                    for each in (write, read):
                        started = time.perf_counter()
                        list(threads.map(each, range(RECORDS)))
                        rates.append(RECORDS * RECORD_BYTES / (time.perf_counter() - started) / 1e9)
            finally:
                store.close()
    except OSError as error:
        raise ConfigError("cannot measure the disk tier", got=str(error), where=str(folder)) from None
    return rates[0], rates[1]


def device_bandwidth(ordinal: int) -> tuple[float, float]:
    """Best GB/s of one large copy from page-locked memory to the GPU, and back. Raises CudaError."""
    from pegainfer.runtime.cuda.device import Device
    from pegainfer.runtime.cuda.memory import DeviceBuffer, PinnedBuffer
    from pegainfer.runtime.cuda.stream import Stream

    device = Device.open(ordinal)
    try:
        host, there = PinnedBuffer(COPY_BYTES, "a copy"), DeviceBuffer(COPY_BYTES, "a copy")
        stream = Stream()

        def up() -> None:
            stream.upload(there.address, host.address, COPY_BYTES, "to the GPU")
            stream.synchronize("to the GPU")

        def down() -> None:
            stream.download(host.address, there.address, COPY_BYTES, "from the GPU")
            stream.synchronize("from the GPU")

        rates = _best(up), _best(down)
        host.free()
        there.free()
        return rates
    finally:
        device.close()


def _best(copy: Callable[[], None]) -> float:
    """GB/s of the fastest of some copies of COPY_BYTES."""
    best = 0.0
    for _ in range(COPY_RUNS):
        started = time.perf_counter()
        copy()
        best = max(best, COPY_BYTES / (time.perf_counter() - started) / 1e9)
    return best
