"""What a runner holds on this machine: KV groups, sequences, tokens of a step, the KV cache."""

from __future__ import annotations

from msgspec.structs import replace

from pegainfer.app.config import EngineConfig
from pegainfer.app.fitting import host_weights
from pegainfer.app.memory import Wish, divide, sequence_bytes, state_bytes
from pegainfer.app.registry import Model
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import RunnerInfo
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kv.device.layout import GroupLayout, StateLayout, kv_spec
from pegainfer.runner.program import Formats
from pegainfer.runtime.control_groups import available_memory

BLOCK_SIZE = 16  # tokens
DEFAULT_SLOTS = 64
# Prefill is as fast in chunks of 64 as of 512 tokens (608 to 619 tokens a CPU second with the default model,
# AVX-512), and decodes in the same step wait for the chunk.
DEFAULT_PREFILL_TOKENS = 128
MAX_KV_BYTES = 1 << 30  # of the default; more where one sequence needs more

GPU_DTYPE = "bf16"  # of weights and activations, and of the cache unless it is asked for in 8 bits
GPU_FORMATS = Formats(activation=GPU_DTYPE, residual=GPU_DTYPE, kv=GPU_DTYPE)
GPU_SLOTS = 256
GPU_PREFILL_TOKENS = 2048  # in one step
# The same of a mixture of experts, each of which a step's tokens read once. 30B-A3B's prompt of 16,000 tokens
# on an H200 takes 384 ms in steps of 2,048, 364 in steps of 4,096 and 348 in steps of 8,192.
GPU_MOE_PREFILL_TOKENS = 8192
# What a step is filled up to (RunnerInfo.fill_tokens). Qwen3-4B's sizes on an H100, ms for 1,024 tokens in
# steps of so many: 512 15.4, 1,024 13.2, 1,152 13.6, 2,048 12.7, 2,176 13.6, 2,304 13.3, 3,072 13.1, 4,096
# 13.1. Beside 31 decode rows a token costs 10.3 µs in a step of 1,024 and 12.0 in one of 2,176.
GPU_FILL_TOKENS = (1024, 2048)
GPU_CACHE_TOKENS = 1 << 21  # of the default; the bookkeeping of a block costs the host some hundred bytes


def step_formats(config: EngineConfig) -> Formats:
    """Storage formats of what a step computes and keeps on the device of this configuration."""
    formats = GPU_FORMATS if config.backend == "cuda" else Formats()
    return replace(formats, kv=config.kv_format, state=config.state_dtype)


def model_groups(model: Model, config: EngineConfig) -> tuple[GroupLayout, ...]:
    """The model's KV groups on the device of this configuration.

    Raises ConfigError where the configuration names a format for states that the model has not.
    """
    groups = model.groups(BLOCK_SIZE, step_formats(config))
    if config.state_dtype != "f32" and not any(isinstance(g, StateLayout) for g in groups):
        raise ConfigError(
            "this model has no recurrent states", expected="f32", got=config.state_dtype,
            where="state_dtype", remedy="leave the option out",
        )  # fmt: skip
    return groups


def runner_info(model: Model, config: EngineConfig, scheduler: SchedulerConfig) -> RunnerInfo:
    """Bounds of the runner: what was asked for, or defaults that fit the machine. Raises ConfigError.

    On a GPU the numbers of blocks are 0: app/gpu.py divides its memory once it is known.
    """
    wish = cache_wish(model, config, scheduler)
    groups = model_groups(model, config)
    if config.backend == "cuda":
        return runner_bounds(model, wish.slots, wish.length, (0,) * len(groups), config, scheduler)
    ranks = config.tensor_parallel_size
    free = max(0, available_memory() - ranks * host_weights(model, wish.length))
    # A running sequence and a snapshot; `groups` are those of one rank.
    need = ranks * (sequence_bytes(groups, wish.length) + state_bytes(groups))
    memory = config.kv_cache_memory or max(min(MAX_KV_BYTES, free // 4), min(need, free // 2))
    d = divide(groups, memory // ranks, wish)
    return runner_bounds(model, d.slots, d.length, d.num_blocks, config, scheduler)


def cache_wish(model: Model, config: EngineConfig, scheduler: SchedulerConfig) -> Wish:
    """What the configuration asks of the KV cache. Raises ConfigError for a length beyond the model's."""
    length = config.max_model_len or model.max_position_embeddings
    if length > model.max_position_embeddings:
        raise ConfigError(
            "max_model_len exceeds what the model was trained for",
            expected=f"≤ {model.max_position_embeddings}",
            got=length,
        )
    cuda = config.backend == "cuda"
    return Wish(
        slots=scheduler.max_slots or (GPU_SLOTS if cuda else DEFAULT_SLOTS),
        slots_asked=scheduler.max_slots is not None,
        length=length,
        length_asked=config.max_model_len is not None,
        step_tokens=_prefill_tokens(model, config, scheduler),
        snapshot_share=config.snapshot_share if scheduler.prefix_cache else 0.0,
        most_tokens=GPU_CACHE_TOKENS if cuda and not config.kv_cache_memory else 0,
    )


def runner_bounds(
    model: Model,
    slots: int,
    length: int,
    num_blocks: tuple[int, ...],
    config: EngineConfig,
    scheduler: SchedulerConfig,
) -> RunnerInfo:
    """The bounds for `slots` sequences of `length` tokens and a cache of so many blocks in each group."""
    # Decodes do not take the place of prompt tokens.
    max_tokens = min(_prefill_tokens(model, config, scheduler), length) + slots
    filled = config.backend == "cuda" and not scheduler.max_prefill_tokens
    return RunnerInfo(
        kv=kv_spec(model_groups(model, config)),
        num_blocks=num_blocks,
        max_slots=slots,
        max_tokens=max_tokens,
        fill_tokens=tuple(n for n in GPU_FILL_TOKENS if n <= max_tokens) if filled else (),
        max_model_len=length,
        vocab_size=model.vocab_size,
        supports_pooling=True,
        counts_experts=config.expert_stats,
        max_adapters=config.max_loras if config.enable_lora else 0,
        max_host_adapters=(config.max_cpu_loras or config.max_loras) if config.enable_lora else 0,
        max_adapter_rank=config.max_lora_rank if config.enable_lora else 0,
    )


def _prefill_tokens(model: Model, config: EngineConfig, scheduler: SchedulerConfig) -> int:
    if scheduler.max_prefill_tokens:
        return scheduler.max_prefill_tokens
    if config.backend != "cuda":
        return DEFAULT_PREFILL_TOKENS
    if model.gpu_prefill_tokens:
        return model.gpu_prefill_tokens
    stacked = any(len(w.shape) == 3 for w in model.weights.values())
    return GPU_MOE_PREFILL_TOKENS if stacked else GPU_PREFILL_TOKENS
