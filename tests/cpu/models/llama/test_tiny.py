"""Every kind of file that the line reads, on seeded tiny models, against transformers' float32 values."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.errors import PegaError
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, Runner, SlotBlocks, StepPlan, StepResult
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kernels.cpu.library import ISAS, kernels
from tests.support.tinymodel import GGUF_MODELS, MODELS, token_ids, write_checkpoint, write_gguf

GOLDEN = np.load(Path(__file__).parents[3] / "data" / "llama" / "tiny.npz")
TOP = 8
MEAN, MAX = 1e-3, 1e-2


def available() -> list[str]:
    """Instruction sets of this processor."""
    found = []
    for isa in ISAS:
        try:
            kernels(isa)
        except PegaError:
            continue
        found.append(isa)
    return found


BACKENDS = [("reference", None), *(("cpu", isa) for isa in available())]
NAMES = [*MODELS, *GGUF_MODELS]


def written(name: str, folder: Path) -> tuple[Path, list[int]]:
    """The model's file or folder, and its fixed text."""
    if name in MODELS:
        return write_checkpoint(MODELS[name], folder / name), token_ids(MODELS[name])
    model, formats = GGUF_MODELS[name]
    return write_gguf(model, folder / f"{name}.gguf", formats), token_ids(model)


def run(runner: Runner, steps: Any, **parts: Any) -> StepResult:
    return runner.sample(runner.forward(StepPlan(step=next(steps), **parts))).wait()


@pytest.mark.parametrize(("backend", "isa"), BACKENDS, ids=lambda v: v or "numpy")
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_and_greedy_tokens(name: str, backend: str, isa: str | None, tmp_path: Path) -> None:
    path, ids = written(name, tmp_path)
    config = EngineConfig(backend=backend, isa=isa, activation="f32", kv_dtype="f32", kv_cache_memory=1 << 22)
    runner = build_engine(path, name, config, SchedulerConfig(max_slots=2)).runner
    try:
        steps = itertools.count(1)
        params = SamplingParams(temperature=0.0, prompt_logprobs=20, logprobs=20)
        new = NewSlot(slot=1, seq=1, tokens=pack_tokens(ids), num_prompt=len(ids), sampling=params, seed=0)
        blocks = (SlotBlocks(1, 0, tuple(range(15, -1, -1))),)
        result = run(runner, steps, news=(new,), blocks=blocks, rows=(Row(1, 0, len(ids), True),))
        entries = [*result.prompt_logprobs[0], *result.logprobs[0]]
        greedy = [result.tokens[0][0]]
        wanted = GOLDEN[f"{name}.greedy"].tolist()
        for i in range(len(wanted) - 1):
            result = run(runner, steps, rows=(Row(1, len(ids) + i, 1, True),))
            greedy.append(result.tokens[0][0])
    finally:
        runner.close()
    assert greedy == wanted
    deltas = []
    for entry, top, logprobs in zip(
        entries, GOLDEN[f"{name}.top_ids"].tolist(), GOLDEN[f"{name}.top_logprobs"], strict=True
    ):
        ours = dict(entry.top)
        deltas.append([ours[i] for i in top] - logprobs)
    error = np.abs(deltas)
    assert error.mean() <= MEAN
    assert error.max() <= MAX
