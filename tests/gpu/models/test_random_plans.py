"""Random traffic on a GPU with few blocks gives the CPU's tokens, or a near tie of logits explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.runtime.cuda.driver import probe
from tests.gpu.harness import sized
from tests.support.answers import answer, compare
from tests.support.tinydeepseek import TRUE_HEADS, TinyDeepseek
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3

QWEN3 = TinyQwen3(
    "gpu", seed=61, dtype="bf16",
    config={
        "head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
        "max_position_embeddings": 512, "num_hidden_layers": 3,
    },
)  # fmt: skip
# A token meets all experts: where near scores send it to another one, it has other logits.
MLA = TinyDeepseek(
    "gpu_mla", seed=62, dtype="bf16",
    config=TRUE_HEADS | {
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000, "num_hidden_layers": 3,
        "n_routed_experts": 3, "num_experts_per_tok": 3, "hidden_size": 256, "intermediate_size": 512,
        "max_position_embeddings": 512, "rope_scaling": None,
    },
)  # fmt: skip
# Each with the bytes that it caches for a token.
MODELS = {"qwen3": (QWEN3, 3 * 2 * 2 * 64 * 2), "mla": (MLA, 3 * 576 * 2)}
TIE = 0.25  # nat; in 10,000 steps bf16 turned no choice that was further apart than half of that
BATCH = 48  # requests that are in the engine together


def requests(rng: np.random.Generator, first: int) -> list[GenerateRequest]:
    """Texts of 1 to 300 tokens, many with a common beginning; greedy, so that tokens can be compared."""
    common = rng.integers(0, 1000, 128).astype(np.int32)
    found = []
    for i in range(BATCH):
        length = int(rng.integers(1, 300))
        tokens = rng.integers(0, 1000, length).astype(np.int32)
        if rng.random() < 0.5:
            shared = int(rng.integers(0, min(length, 128)))
            tokens[:shared] = common[:shared]
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 60)), ignore_eos=True, logprobs=5, **decided(rng)
        )
        found.append(
            GenerateRequest(
                id=f"r{first + i}", prompt=pack_tokens(tokens.tolist()), sampling=sampling,
                n=int(rng.choice([1, 1, 1, 2, 3])),
            )
        )  # fmt: skip
    return found


def decided(rng: np.random.Generator) -> dict[str, Any]:
    """Sampling parameters under which the best token is drawn, or one that is named."""
    kind, token = rng.random(), int(rng.integers(0, 1000))
    if kind < 0.1:
        return {"temperature": 0.8, "top_k": 1, "seed": token}
    if kind < 0.2:
        return {"temperature": 0.9, "allowed_token_ids": (token,)}
    if kind < 0.3:
        return {"temperature": 0.0, "logit_bias": ((token, 1000.0),)}
    return {"temperature": 0.0}


def run(folder: Path, token_bytes: int, steps: int) -> dict[str, Any]:
    """Until the GPU has made so many steps, in whole batches of requests; returns what was seen.

    Args:
        token_bytes: what the model caches for a token.
    """
    rng = np.random.default_rng(11)
    gpu_config = EngineConfig(backend="cuda", max_model_len=400, kv_cache_memory=150 * 16 * token_bytes)
    # Without a latency target, whose chunks depend on the clock.
    gpu_scheduler = SchedulerConfig(max_slots=24, max_prefill_tokens=200, target_itl_ms=0.0)
    cpu_config = EngineConfig(backend="cpu", activation="f32", kv_dtype="f32", max_model_len=400)
    gpu = build_engine(folder, "gpu", gpu_config, gpu_scheduler)
    cpu = build_engine(folder, "cpu", cpu_config, SchedulerConfig(max_slots=24))
    left = InProcessEngine(gpu.runner, gpu.info, gpu_scheduler)
    right = InProcessEngine(cpu.runner, cpu.info, SchedulerConfig(max_slots=24))
    sequences, gaps, count = 0, [], 0
    try:
        while left.stats().steps < steps:
            batch = requests(rng, count)
            count += len(batch)
            cancelled = {r.id: int(rng.integers(1, 8)) for r in batch if rng.random() < 0.15}
            got, want = answer(left, batch, cancelled), answer(right, batch, {})
            for r in batch:
                gaps += compare(got[r.id], want[r.id], TIE)
                sequences += r.n
        stats = left.stats()
    finally:
        left.close()
        right.close()
    return {
        "steps": stats.steps, "requests": count, "sequences": sequences, "preemptions": stats.preemptions,
        "prefix_hits": stats.prefix_hits, "ties": len(gaps), "largest_gap": max(gaps, default=0.0),
    }  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [sized(1500, 1), pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_random_traffic_gives_the_cpu_s_tokens(name: str, steps: int, tmp_path: Path) -> None:
    if (reason := probe()) is not None:
        pytest.skip(reason)
    model, token_bytes = MODELS[name]
    seen = run(write_checkpoint(model, tmp_path), token_bytes, steps)
    print(seen)
    assert seen["preemptions"] > 0 and seen["prefix_hits"] > 0
    assert seen["ties"] < seen["sequences"] * 0.6
