"""The machine's ceilings, for each instruction set."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pegainfer.kernels.cpu.library import has_bf16
from pegainfer.measure.cpu.roofline import last_level_cache, measure_roofline
from tests.cpu.kernels.harness import ISAS


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_ceiling_is_a_rate(isa: str, threads: int) -> None:
    roof = measure_roofline(threads, isa)
    assert set(roof.peaks) == {"f32", "int8"} | ({"bf16"} if has_bf16(isa) else set())
    assert all(0 < rate < math.inf for rate in (roof.read_gb_s, roof.cache_gb_s, *roof.peaks.values()))


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "1024K", "96M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_cache(tmp_path) == 96 << 20


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert last_level_cache(tmp_path) == 32 << 20
