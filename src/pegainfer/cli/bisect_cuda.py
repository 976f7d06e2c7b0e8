"""Finds the op at which a GPU goes wrong: each op of a step beside its reference.

A reference gets what the device has computed so far, so that errors do not add up from op to op. Weights are
those of the file, rounded to bf16 as the device holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pegainfer.app.bounds import GPU_DTYPE, model_groups, runner_info, step_formats
from pegainfer.app.config import EngineConfig
from pegainfer.app.load import open_model
from pegainfer.app.registry import Model
from pegainfer.cli.bisect import Difference, layer_of
from pegainfer.cli.spec import EngineSpec
from pegainfer.contract.errors import UnsupportedError
from pegainfer.contract.step import RunnerInfo
from pegainfer.kv.device.cuda_pool import CudaPools
from pegainfer.kv.device.layout import GroupLayout, PageLayout
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.measure.cuda.compare import compare_step
from pegainfer.ops.rounding import rounded
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.weights.weight import Weight

Array = np.ndarray[Any, Any]


def compare(spec: EngineSpec, ids: list[int], answer: int) -> list[Difference]:
    """Runs the forward pass of the prompt `ids` and of `answer` greedy tokens after it, op by op.

    Sampling is not compared: its whole numbers are the CPU's.

    Raises what loading the model raises, CudaError, KernelsError, and UnsupportedError for dummy weights,
    which are on the device alone.
    """
    if spec.engine.load_format == "dummy":
        raise UnsupportedError("dummy weights cannot be compared", expected="weights from a file")
    with open_model(Path(spec.path)) as (model, _):
        length = len(ids) + answer
        engine = dataclasses.replace(spec.engine, max_model_len=length, kv_cache_memory=None)
        info = runner_info(model, engine, spec.scheduler)
        groups = model_groups(model, engine)
        # One sequence, whose blocks and states have the numbers 0, 1, 2, and so on.
        num_blocks = tuple(-(-length // g.block_size) if isinstance(g, PageLayout) else 1 for g in groups)
        info = msgspec.structs.replace(info, num_blocks=num_blocks, max_slots=1, max_tokens=len(ids))
        weights = model.tensors(length)
        ctx = CudaContext(spec.engine.device_ordinal)
        try:
            executor = _ready(ctx, model, groups, info, engine, weights)
            constants = {name: _as_on_device(w) for name, w in weights.items()}
            return _steps(ctx, executor, groups, constants, ids, answer)
        finally:
            ctx.close()


def _ready(
    ctx: CudaContext,
    model: Model,
    groups: tuple[GroupLayout, ...],
    info: RunnerInfo,
    config: EngineConfig,
    weights: Mapping[str, Weight],
) -> CudaExecutor:
    """The forward pass without graphs, over a cache of one sequence."""
    forward = model.programs(info, groups, step_formats(config), 0)["forward"]
    pools = CudaPools(groups, info.num_blocks)
    for part in pools.states.values():
        ctx.stream.fill(part.address, 0, part.nbytes)
    backend = CudaBackend(ctx, weights, CudaOptions(graphs=False, tune=False))
    executor = backend.prepare(forward, pools.states, {"T": info.max_tokens, "R": 1, "L": 1})
    backend.load()
    return executor


def _as_on_device(weight: Weight) -> Array:
    values = weight.values()
    return rounded(values, GPU_DTYPE) if weight.dtype != "f32" else values


def _steps(
    ctx: CudaContext,
    executor: CudaExecutor,
    groups: tuple[GroupLayout, ...],
    constants: Mapping[str, Array],
    ids: list[int],
    answer: int,
) -> list[Difference]:
    found: list[Difference] = []
    tokens, start = list(ids), 0
    shapes = {t.name: t.sizes({"T": 0, "R": 1, "L": 1}) for t in executor.program.tensors(Kind.INPUT)}
    for step in range(answer):
        inputs = _inputs(tokens, start) | _group_inputs(groups, start, len(tokens), shapes)
        env = {"T": len(tokens) - start, "R": 1, "L": 1}
        found += [
            Difference(
                step,
                executor.program.name,
                d.index,
                d.call.spec.name,
                d.operand,
                layer_of(d.call),
                d.relative,
            )
            for d in compare_step(executor, ctx, constants, inputs, env)
        ]
        start = len(tokens)
        tokens.append(int(executor.output("logits", env).numpy(ctx.stream)[0].argmax()))
    return found


def _inputs(tokens: list[int], start: int) -> dict[str, Array]:
    """A step over the tokens of one sequence from `start` on."""
    places = np.arange(start, len(tokens), dtype=np.int32)
    count = len(places)
    values = {
        "token_ids": np.array(tokens[start:]), "positions": places,
        "query_starts": [0], "query_lens": [count], "context_lens": [len(tokens)],
        "logit_rows": [count - 1],
    }  # fmt: skip
    return {name: np.asarray(v, np.int32) for name, v in values.items()}


def _group_inputs(
    groups: tuple[GroupLayout, ...], start: int, stop: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """Inputs of the KV groups for positions [start, stop) of one sequence whose blocks lie in order."""
    found: dict[str, Array] = {}
    for g in groups:
        if isinstance(g, PageLayout):
            found[f"{g.name}.places"] = np.arange(start, stop, dtype=np.int32)
            width = shapes[f"{g.name}.block_table"][1]
            found[f"{g.name}.block_table"] = np.arange(width, dtype=np.int32)[None]
        else:
            found[f"{g.name}.state_ids"] = np.zeros(1, np.int32)
            found[f"{g.name}.state_saves"] = np.full(stop - start, -1, np.int32)
    return {name: array for name, array in found.items() if name in shapes}
