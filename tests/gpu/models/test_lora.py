"""LoRA adapters on a GPU: the CPU's tokens for any mix of them, in graphs and without, while they change."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.app.lora import wait
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.runtime.cuda.driver import probe
from tests.support.answers import answer, compare
from tests.support.tinylora import ADAPTERS, write_adapter
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3

MODEL = TinyQwen3(
    "gpu", seed=61, dtype="bf16",
    config={
        "head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
        "max_position_embeddings": 512, "num_hidden_layers": 2,
    },
)  # fmt: skip
TIE = 0.25  # nat, as in test_random_plans.py
SCHEDULER = SchedulerConfig(max_slots=16, max_prefill_tokens=400, target_itl_ms=0.0)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (reason := probe()) is not None:
        pytest.skip(reason)
    made = tmp_path_factory.mktemp("lora")
    write_checkpoint(MODEL, made / "model")
    for name, adapter in ADAPTERS.items():
        write_adapter(adapter, MODEL, made / name)
    return made


def engine(folder: Path, backend: str, slots: int, **options: object) -> InProcessEngine:
    exact = {"activation": "f32", "kv_dtype": "f32"} if backend == "cpu" else {}
    config = EngineConfig(
        backend=backend, max_model_len=400, kv_cache_memory=1 << 24, enable_lora=True, max_loras=slots,
        max_lora_rank=8, **exact, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    built = build_engine(folder / "model", "m", config, SCHEDULER)
    made = InProcessEngine(built.runner, built.info, SCHEDULER)
    for name in ADAPTERS:
        wait(partial(made.load_adapter, name, str(folder / name)))
    return made


def requests(count: int, seed: int) -> list[GenerateRequest]:
    """Of all adapters and the base, greedy; some ask for the logprobs of their prompts."""
    rng = np.random.default_rng(seed)
    names = [None, *ADAPTERS]
    return [
        GenerateRequest(
            id=f"r{i}",
            prompt=pack_tokens(rng.integers(0, 1000, int(rng.integers(1, 320))).tolist()),
            sampling=SamplingParams(
                max_tokens=int(rng.integers(1, 40)), ignore_eos=True, temperature=0.0, logprobs=5,
                prompt_logprobs=2 if i % 7 == 0 else None,
            ),
            adapter=names[i % len(names)],
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(("slots", "graphs"), [(len(ADAPTERS), True), (len(ADAPTERS), False), (2, True)])
def test_a_mix_of_adapters_gives_the_cpu_s_tokens(slots: int, graphs: bool, folder: Path) -> None:
    """With two slots, adapters take turns while others are decoded."""
    batch = requests(48, seed=3)
    left, right = engine(folder, "cuda", slots, cuda_graph=graphs), engine(folder, "cpu", len(ADAPTERS))
    try:
        got, want = answer(left, batch, {}), answer(right, batch, {})
        loads = left.stats().adapter_loads
    finally:
        left.close()
        right.close()
    gaps = [gap for r in batch for gap in compare(got[r.id], want[r.id], TIE)]
    assert len(gaps) < 0.6 * len(batch)
    assert (loads > slots) == (slots < len(ADAPTERS))


def test_each_adapter_gives_other_tokens_than_the_base(folder: Path) -> None:
    """But one, whose change is smaller than the lead of the best tokens."""
    names = [None, *(name for name in ADAPTERS if name != "one_layer_by_expression")]
    made = engine(folder, "cuda", len(ADAPTERS))
    prompt = np.random.default_rng(5).integers(0, 1000, 100).tolist()
    try:
        batch = [
            GenerateRequest(
                id=str(name), prompt=pack_tokens(prompt), adapter=name,
                sampling=SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=1),
            )
            for name in names
        ]  # fmt: skip
        found = answer(made, batch, {})
    finally:
        made.close()
    texts = {tuple(a.tokens[0]) for a in found.values()}
    assert len(texts) == len(found)
