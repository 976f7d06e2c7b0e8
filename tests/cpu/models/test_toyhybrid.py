"""A line with pages and states on the CPU's kernels, through the whole engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.hybrid_traffic import check_coverage, memory_of, run
from tests.support.tinyrun import available
from tests.support.toyhybrid.checkpoint import register, write_toy

STEPS = int(os.environ.get("PEGAINFER_HYBRID_STEPS", "1000"))


@pytest.mark.parametrize("isa", available())
def test_random_traffic_gives_the_tokens_of_each_request_alone(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    folder = write_toy(tmp_path)
    check_coverage(
        run(folder, STEPS, backend="cpu", isa=isa, activation="f32", kv_dtype="f32", **memory_of(folder))
    )
