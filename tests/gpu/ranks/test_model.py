"""A model on ranks, with a GPU each or one together: one rank's tokens, and an end when a rank fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app import ranks as app_ranks
from pegainfer.app.assemble import build_engine
from pegainfer.app.bounds import GPU_FORMATS
from pegainfer.app.config import EngineConfig
from pegainfer.contract.errors import EngineDeadError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.parallel.group import RankGroup
from tests.cpu.parallel.test_lines import ALONE, memory_of
from tests.cpu.parallel.test_ranks import others, steps
from tests.gpu.harness import sized
from tests.gpu.ranks.test_sums import gpus
from tests.support.hybrid_traffic import run
from tests.support.tinydeepseek import TRUE_HEADS, TinyDeepseek
from tests.support.tinymodel import Tiny, write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3
from tests.support.tinyqwen3_5 import TextOnly
from tests.support.tinyqwen3moe import TinyQwen3Moe

WIDE = {
    "head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
    "max_position_embeddings": 512,
}  # fmt: skip
MODELS = [Tiny("m", seed=5, dtype="bf16", config=WIDE), TinyQwen3("m", seed=6, dtype="bf16", config=WIDE)]
HYBRID = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "full_attention_interval": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "vocab_size": 1000,
}  # fmt: skip
# Every token takes all experts, because another choice between close scores would change its logits.
LATENT = TRUE_HEADS | {
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000, "n_routed_experts": 3,
    "num_experts_per_tok": 3, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64,
    "max_position_embeddings": 512, "rope_scaling": None,
}  # fmt: skip
FOUR_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
LINES = {
    "llama": MODELS[0],
    "qwen3": MODELS[1],
    "qwen3_moe": TinyQwen3Moe("m", seed=7, dtype="bf16", config=WIDE | EXPERTS),
    "deepseek_v2": TinyDeepseek("m", seed=8, dtype="bf16", config=LATENT),
    "qwen3_5": TextOnly("m", seed=9, dtype="bf16", config=HYBRID),
}
STEPS = int(os.environ.get("PEGAINFER_RANK_STEPS", sized("150", "1")))
TIE = 0.25  # nat, as in tests/gpu/models/test_random_plans.py


def engine(shared: bool) -> dict[str, Any]:
    """Fields of EngineConfig. Skips the test without the GPUs."""
    if gpus() < 2 and not shared:
        pytest.skip("2 GPUs are needed")
    return {"backend": "cuda", "tensor_parallel_size": 2, "share_gpu": shared}


WHERE = pytest.mark.parametrize("shared", [True, False], ids=["one GPU", "a GPU each"])


@pytest.mark.timeout(600)
@WHERE
@pytest.mark.parametrize(
    ("line", "whole"), [*((line, False) for line in LINES), ("qwen3_moe", True), ("deepseek_v2", True)]
)
def test_random_traffic_gives_the_tokens_of_one_rank(
    line: str, whole: bool, shared: bool, tmp_path: Path
) -> None:
    """Preemption, prefix hits, chunks, draws inside graphs. The ranks' results are compared in every step.

    `whole`: expert parallelism, so each rank has whole experts.
    """
    model = LINES[line]
    if whole and line == "deepseek_v2":  # whose three experts do not divide
        model = TinyDeepseek("m", seed=8, dtype="bf16", config=LATENT | FOUR_EXPERTS)
    folder = write_checkpoint(model, tmp_path)
    seen = run(
        folder, STEPS, tie=TIE, alone={**ALONE, "share_gpu": False}, enable_expert_parallel=whole,
        **memory_of(folder, 2, GPU_FORMATS), **engine(shared),
    )  # fmt: skip
    print(seen)
    assert seen["differences"] == 0
    for name in ("preemptions", "page blocks hit", "chunks", "following rows", "repeated steps"):
        assert seen[name] > 0, f"no {name}"


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """Two ranks on one GPU, which wait five seconds for each other."""
    monkeypatch.setattr(app_ranks, "WAIT_SECONDS", 5.0)
    config = EngineConfig(kv_cache_memory=1 << 24, max_model_len=256, **engine(True))
    folder = write_checkpoint(MODELS[0], tmp_path)
    runner = build_engine(folder, "m", config, SchedulerConfig(max_slots=2)).runner
    assert isinstance(runner, RankGroup)
    processes = others(runner)
    try:
        yield runner
    finally:
        runner.close()
    assert all(rank.process.poll() is not None for rank in processes), "a process is left"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "rank 1 has ended; got SIGKILL"),
        (signal.SIGSTOP, r"rank 1 (of 2 )?does not answer"),
    ],
)
def test_a_rank_that_fails_ends_the_engine_and_is_named(
    group: RankGroup, number: signal.Signals, message: str
) -> None:
    assert len(steps(group, 20)) == 21
    others(group)[0].process.send_signal(number)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=message):
        steps(group, 100)
    with pytest.raises(EngineDeadError):  # and stays so
        steps(group, 1)
    assert time.monotonic() - began < 15.0
