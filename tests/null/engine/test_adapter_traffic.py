"""Many more adapters than slots, Zipf distributed: every request is answered, none waits for long.

`python bench/lora_traffic.py` runs such traffic with threads and clocks; here time is counted in steps.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from pegainfer.engine.scheduler import SchedulerConfig
from tests.null.engine.harness import Driver, null_config, request

ADAPTERS, REQUESTS, CLIENTS = 200, 400, 16


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"a{i}" for i in range(ADAPTERS)]
    for path in paths:
        path.write_text(f"an adapter, {path.name}")
    return paths


def serve(files: list[Path], names: list[str | None], slots: int) -> tuple[Driver, int, int]:
    """As many requests at a time as there are clients; steps in all, and the most that one request took."""
    device = null_config(
        max_adapters=slots, max_slots=CLIENTS, max_tokens=64, num_blocks=(256,), virtual=True
    )
    driver = Driver(device, SchedulerConfig(), check=False)
    for file in files:
        driver.load_adapter(file.name, str(file))
    begun: dict[str, int] = {}
    longest = steps = sent = 0
    while sent < len(names) or begun:
        while sent < len(names) and len(begun) < CLIENTS:
            prompt = [(sent + i) % 20 for i in range(12)]
            driver.add(request(f"r{sent}", prompt, adapter=names[sent], max_tokens=8, ignore_eos=True))
            begun[f"r{sent}"] = steps
            sent += 1
        driver.step()
        steps += 1
        for name in [n for n in begun if driver.answers[n, 0].finish is not None]:
            longest = max(longest, steps - begun.pop(name))
        assert steps < 100 * REQUESTS
    driver.run()
    driver.judge()
    return driver, steps, longest


def test_two_hundred_adapters_in_eight_slots(files: list[Path]) -> None:
    weights = [1 / (i + 1) for i in range(ADAPTERS)]
    names = random.Random(3).choices([f.name for f in files], weights, k=REQUESTS)
    alone, base_steps, base_longest = serve([], [None] * REQUESTS, slots=0)
    driver, steps, longest = serve(files, [*names], slots=8)
    assert driver.counts["finish length"] == alone.counts["finish length"] == REQUESTS
    # Requests in the order of their arrival would need a load wherever the adapter changes.
    changes = sum(a != b for a, b in itertools.pairwise(names))
    assert driver.counts["adapter loads"] < 0.85 * changes
    assert steps < 2.5 * base_steps
    assert longest < 4 * base_longest


def test_an_adapter_in_constant_use_does_not_keep_others_out(files: list[Path]) -> None:
    """One slot; all clients but one ask for the same adapter."""
    names = [files[1 + i // 40].name if i % 40 == 20 else files[0].name for i in range(200)]
    driver, _, longest = serve(files[:8], [*names], slots=1)
    assert driver.counts["finish length"] == 200
    assert longest < 60
