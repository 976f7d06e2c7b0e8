"""A line with pages and states on a GPU: random traffic gives the tokens of each request alone.

PEGAINFER_HYBRID_STEPS is the number of steps. The test prints what it counted.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pegainfer.runtime.cuda.driver import probe
from tests.gpu.harness import sized
from tests.support.hybrid_traffic import check_coverage, memory_of, run
from tests.support.toyhybrid.checkpoint import register, write_toy

STEPS = int(os.environ.get("PEGAINFER_HYBRID_STEPS", sized(2000, 100)))
TIE = 0.25  # nat; as in test_random_plans.py


@pytest.mark.timeout(600)
@pytest.mark.parametrize("graphs", [True, False])
def test_random_traffic_gives_the_tokens_of_each_request_alone(
    graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := probe()) is not None:
        pytest.skip(reason)
    register(monkeypatch)
    folder = write_toy(
        tmp_path, dtype="bf16", hidden_size=256, intermediate_size=512, head_dim=64, delta_dim=128,
        num_hidden_layers=3, vocab_size=1000,
    )  # fmt: skip
    memory = memory_of(folder, backend="cuda")
    seen = run(folder, STEPS, tie=TIE, backend="cuda", cuda_graph=graphs, **memory)
    check_coverage(seen)
    assert seen["answers that part at a tie"] < 0.6 * seen["answers"]
