"""Seeded tiny models through the whole engine, against transformers' values in float32."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.adapter import NO_ADAPTER, AdapterRunner
from pegainfer.contract.errors import PegaError
from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, Runner, SlotBlocks, StateGroup, StepPlan, StepResult
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kernels.cpu.library import ISAS, kernels

Array = np.ndarray[Any, Any]


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


@dataclass(frozen=True)
class Comparison:
    """greedy, wanted: ids after the text; errors: |Δ log-probability| of the best tokens, [positions, K]."""

    greedy: list[int]
    wanted: list[int]
    errors: Array


def compare(
    path: Path,
    ids: list[int],
    golden: Mapping[str, Array],
    name: str,
    backend: str,
    isa: str | None,
    adapter: Path | None = None,
    **engine: Any,
) -> Comparison:
    """A model's file or folder run over its fixed text in one step, then greedily.

    Args:
        golden: values that tests/golden/teacher.py wrote, this model's under `name`.
        adapter: folder of a LoRA adapter that the text is run with.
        engine: other fields of EngineConfig.
    """
    wanted = golden[f"{name}.greedy"].tolist()
    entries, greedy = forced(
        path, ids, name, len(wanted), backend=backend, isa=isa, adapter=adapter, **engine
    )
    best = zip(entries, golden[f"{name}.top_ids"].tolist(), golden[f"{name}.top_logprobs"], strict=True)
    errors = [[dict(entry.top)[i] for i in top] - logprobs for entry, top, logprobs in best]
    return Comparison(greedy, wanted, np.abs(errors))


def forced(
    path: Path,
    ids: list[int],
    name: str,
    follow: int,
    *,
    activation: str = "f32",
    kv_dtype: str = "f32",
    adapter: Path | None = None,
    chunk: int = 0,
    **engine: Any,
) -> tuple[list[TokenLogprob], list[int]]:
    """A text, then `follow` greedy tokens: what follows each of the text's tokens, and those ids.

    Args:
        chunk: tokens of the text that a step takes; 0: all.
        adapter: folder of a LoRA adapter that the text is run with.
        engine: other fields of EngineConfig.
    """
    if adapter is not None:
        engine |= {"enable_lora": True, "max_loras": 2}
    config = EngineConfig(activation=activation, kv_dtype=kv_dtype, kv_cache_memory=1 << 22, **engine)
    scheduler = SchedulerConfig(max_slots=2, max_prefill_tokens=len(ids))
    runner = build_engine(path, name, config, scheduler).runner
    try:
        steps = itertools.count(1)
        params = SamplingParams(temperature=0.0, prompt_logprobs=20, logprobs=20)
        index = NO_ADAPTER
        if adapter is not None:
            assert isinstance(runner, AdapterRunner)
            index = 1
            runner.install_adapter(index, runner.read_adapter(name, str(adapter))[1])
        new = NewSlot(
            slot=1, seq=1, tokens=pack_tokens(ids), num_prompt=len(ids), sampling=params, seed=0,
            adapter=index,
        )  # fmt: skip
        blocks = tuple(
            SlotBlocks(1, g, (1,) if isinstance(group, StateGroup) else tuple(range(15, -1, -1)))
            for g, group in enumerate(runner.info.kv.groups)
        )
        entries, parts = [], {"news": (new,), "blocks": blocks}
        for at in range(0, len(ids), chunk or len(ids)):
            count = min(chunk or len(ids), len(ids) - at)
            result = _run(runner, steps, rows=(Row(1, at, count, at + count == len(ids)),), **parts)
            entries += result.prompt_logprobs.get(0, ())
            parts = {}
        entries += result.logprobs[0]
        greedy = [result.tokens[0][0]]
        for i in range(follow - 1):
            result = _run(runner, steps, rows=(Row(1, len(ids) + i, 1, True),))
            greedy.append(result.tokens[0][0])
    finally:
        runner.close()
    return entries, greedy


def _run(runner: Runner, steps: Any, **parts: Any) -> StepResult:
    return runner.sample(runner.forward(StepPlan(step=next(steps), **parts))).wait()


def score_errors(entries: list[TokenLogprob], ids: Array, logprobs: Array) -> Array:
    """How far the log-probabilities of each text token's wanted ids [n, k] are from those wanted, absolute.

    An id that is not among an entry's best counts as the last of them.
    """
    errors = []
    for entry, wanted, exact in zip(entries, ids.tolist(), logprobs, strict=True):
        top = dict(entry.top)
        errors.append([top.get(i, entry.top[-1][1]) for i in wanted] - exact)
    return np.abs(errors)
