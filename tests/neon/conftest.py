"""Processes that replay programs on the cross-compiled kernels, under emulators of 64-bit Arm processors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.replay.client import Replay

DRIVER = Path(__file__).parents[2] / "build" / "aarch64" / "replay"  # Makefile: neon
EMULATOR, SYSROOT = "qemu-aarch64", "/usr/aarch64-linux-gnu"
CPU = "neoverse-n1"  # Armv8.2 with the dot product, and nothing newer that the kernels might use unawares


@pytest.fixture(scope="session")
def replay_on() -> Iterator[Callable[[str], Replay]]:
    """Gives a process on a processor that the emulator knows by name: the one at hand unless it has died."""
    if not DRIVER.is_file():
        pytest.skip(f"{DRIVER} is not built: make neon")
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is missing: apt-get install qemu-user")
    started: dict[str, Replay] = {}

    def get(cpu: str) -> Replay:
        if cpu in started and not started[cpu].alive:
            started.pop(cpu).close()
        if cpu not in started:
            started[cpu] = Replay([EMULATOR, "-L", SYSROOT, "-cpu", cpu, DRIVER])
        return started[cpu]

    yield get
    for replay in started.values():
        replay.close()


@pytest.fixture
def replay(replay_on: Callable[[str], Replay]) -> Replay:
    return replay_on(CPU)
