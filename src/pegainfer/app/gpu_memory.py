"""A GPU's memory: what weights, steps and adapters take, and the KV cache that is left."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import msgspec

from pegainfer.app.bounds import cache_wish, runner_bounds, step_formats
from pegainfer.app.config import EngineConfig
from pegainfer.app.memory import divide, sequence_bytes
from pegainfer.app.registry import Model
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import RunnerInfo
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import largest_step
from pegainfer.runner.slots import table_widths

log = logging.getLogger(__name__)

RESERVE = 1 << 30  # bytes: scratch of kernels, cuBLASLt's workspace, graphs, staged inputs


@dataclass(frozen=True)
class Budget:
    """Where a GPU's memory goes, in bytes."""

    total: int
    used: int  # by others and by the CUDA context
    weights: int
    steps: int  # what steps compute in, RESERVE included
    adapters: int  # slots of LoRA adapters
    allowed: int  # utilization · total

    @property
    def cache(self) -> int:
        return self.allowed - self.used - self.weights - self.steps - self.adapters

    def __str__(self) -> str:
        parts = {"allowed": self.allowed, "in use": self.used, "weights": self.weights, "steps": self.steps}
        if self.adapters:
            parts["adapters"] = self.adapters
        return ", ".join(f"{name} {n / 2**30:.2f}" for name, n in parts.items()) + " GiB"


def quicker_form(
    model: Model,
    groups: tuple[GroupLayout, ...],
    budget: Budget,
    length: int,
    config: EngineConfig,
    *,
    fp8: bool,
) -> tuple[Model, Budget]:
    """Expands quantised matrices to bf16, whose steps are quicker, where that leaves the cache enough room.

    That is half of the room that packed matrices leave, and at least `--kv-cache-memory` and one sequence of
    `length` tokens. Matrices that `--quantization` quantised stay packed, and so do those of several ranks,
    because a rank does not know how much memory the GPUs of the others have.

    Args:
        groups: of the KV cache.
        budget: of the packed model.
        length: tokens of a sequence.
        fp8: as in `plan_memory`.
    """
    wide = model.expanded()
    expanded = replace(budget, weights=wide.weight_bytes(length, fp8=fp8))
    if (
        expanded.weights == budget.weights
        or config.quantization is not None
        or config.tensor_parallel_size > 1
    ):
        return model, budget
    needed = max(config.kv_cache_memory or 0, sequence_bytes(groups, length))
    if 2 * expanded.cache < budget.cache or expanded.cache < needed:
        return model, budget
    log.info(
        "quantised matrices are expanded to bf16, because steps are quicker: %.2f GiB instead of %.2f",
        expanded.weights / 2**30, budget.weights / 2**30,
    )  # fmt: skip
    return wide, expanded


def fit(
    model: Model,
    groups: tuple[GroupLayout, ...],
    budget: Budget,
    config: EngineConfig,
    scheduler: SchedulerConfig,
) -> RunnerInfo:
    """The runner's bounds, with the cache divided among its groups. Raises ConfigError if it does not fit."""
    room = max(0, budget.cache)
    memory = (config.kv_cache_memory or 0) // config.tensor_parallel_size or room
    check_weights(budget)
    remedy = "lower --max-model-len, --max-num-seqs or --kv-cache-memory, or raise --gpu-memory-utilization"
    if memory > room:
        raise ConfigError(
            "the GPU's memory cannot hold the KV cache",
            expected=f"≥ {memory / 2**20:.0f} MiB",
            got=f"{room / 2**20:.0f} MiB ({budget})",
            remedy=remedy,
        )
    wish = cache_wish(model, config, scheduler)
    d = divide(groups, memory, wish, where=f" ({budget})", remedy=remedy)
    return runner_bounds(model, d.slots, d.length, d.num_blocks, config, scheduler)


def check_weights(budget: Budget) -> None:
    """Raises ConfigError where weights and steps alone take more than is allowed."""
    if budget.cache > 0:
        return
    need = budget.used + budget.weights + budget.steps
    remedy = f"use a GPU with more than {need / 2**30:.2f} GiB, or --device cpu with a quantised file"
    if need < budget.total:
        remedy = f"raise --gpu-memory-utilization above {need / budget.total:.2f}"
    raise ConfigError(
        "the model does not fit into the GPU's memory",
        expected=f"< {budget.allowed / 2**30:.2f} GiB",
        got=f"{need / 2**30:.2f} GiB, {-budget.cache / 2**30:.2f} GiB too much without a KV cache ({budget})",
        remedy=f"{remedy}; lower --max-model-len and --max-num-seqs for smaller steps",
    )


def plan_memory(
    model: Model,
    groups: tuple[GroupLayout, ...],
    info: RunnerInfo,
    config: EngineConfig,
    free: int,
    total: int,
    max_logprobs: int,
    *,
    fp8: bool = False,
) -> Budget:
    """Counts all but the cache: weights in their formats here, and the arenas of the recorded programs.

    fp8: whether the GPU keeps FP8 weights in 8 bits.
    """
    one = msgspec.structs.replace(info, num_blocks=(1,) * len(groups))
    programs = model.programs(one, groups, step_formats(config), max_logprobs)
    arenas = sum(p.plan_arena(largest_step(info)).size for p in programs.values())
    plain = model.plain_forward(one, groups, step_formats(config))
    if plain is not None:  # the two programs share their outputs
        outputs = {t.name for t in plain.tensors(Kind.OUTPUT)}
        arenas += plain.plan_arena(largest_step(info), elsewhere=outputs).size
    widths = sum(table_widths(info.kv, info.max_model_len))
    tables = 4 * info.max_slots * (info.max_model_len + 2 * widths)  # histories, slots' and a step's tables
    allowed = int(total * config.gpu_memory_utilization)
    weights = model.weight_bytes(info.max_model_len, fp8=fp8)
    adapters = model.adapter_bytes(info)
    return Budget(total, total - free, weights, arenas + tables + RESERVE, adapters, allowed)
