"""Host and disk tiers on a GPU: random traffic gives the tokens of each request alone, also after a restart.

PEGAINFER_HYBRID_STEPS is the number of steps. The test prints what it counted.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pegainfer.runtime.cuda.driver import probe
from tests.gpu.harness import sized
from tests.support.hybrid_traffic import memory_of, run
from tests.support.toyhybrid.checkpoint import register, write_toy

STEPS = int(os.environ.get("PEGAINFER_HYBRID_STEPS", sized(2000, 100)))
TIE = 0.25  # nat; as in test_random_plans.py


@pytest.mark.timeout(600)
def test_random_traffic_with_tiers_gives_the_tokens_of_each_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := probe()) is not None:
        pytest.skip(reason)
    register(monkeypatch)
    folder = write_toy(
        tmp_path / "model", dtype="bf16", hidden_size=256, intermediate_size=512, head_dim=64, delta_dim=128,
        num_hidden_layers=3, vocab_size=1000,
    )  # fmt: skip
    memory = memory_of(folder, backend="cuda")
    size = memory["kv_cache_memory"]
    tiers = {"kv_offload": 2 * size, "kv_offload_disk": f"{tmp_path / 'tier'}:{40 * size}"}
    for run_number in range(2):
        seen = run(
            folder, STEPS, tie=TIE, alone={"kv_offload": 0, "kv_offload_disk": ""}, backend="cuda", **memory,
            **tiers,
        )  # fmt: skip
        assert seen["differences"] == 0
        assert seen["host tier: failures"] == seen["disk tier: failures"] == 0
        assert seen["answers that part at a tie"] < 0.6 * seen["answers"]
        loaded = seen["host tier: tokens loaded"] + seen["disk tier: tokens loaded"]
        assert loaded > 0 and (not run_number or seen["disk tier: tokens loaded"] > 0)
