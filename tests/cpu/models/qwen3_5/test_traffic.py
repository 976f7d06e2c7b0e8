"""Random traffic on a small Qwen3.5 gives each request the tokens that it has alone, bit for bit.

Prefix hits on pages and states, forks, preemption, chunked prefill and repeated steps all occur.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.hybrid_traffic import check_coverage, memory_of, run
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3_5 import MODELS
from tests.support.tinyrun import available

STEPS = int(os.environ.get("PEGAINFER_HYBRID_STEPS", "600"))


@pytest.mark.parametrize("isa", available())
def test_random_traffic_gives_the_tokens_of_each_request_alone(isa: str, tmp_path: Path) -> None:
    folder = write_checkpoint(MODELS["published_bf16"], tmp_path)
    check_coverage(
        run(folder, STEPS, backend="cpu", isa=isa, activation="f32", kv_dtype="f32", **memory_of(folder))
    )
