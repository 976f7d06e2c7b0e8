"""From an open model to a Runner on a GPU: what fits into its memory, weights, graphs."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import msgspec

from pegainfer.app.config import EngineConfig
from pegainfer.app.registry import Model
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import RunnerInfo
from pegainfer.runner.program import Formats, largest_step, only_group

if TYPE_CHECKING:
    from pegainfer.kernels.cuda.backend import CudaBackend
    from pegainfer.kernels.cuda.target import Target
    from pegainfer.runner.cuda import CudaRunner

log = logging.getLogger(__name__)

DTYPE = "bf16"  # of weights, activations and the cache
FORMATS = Formats(activation=DTYPE, residual=DTYPE, kv=DTYPE)
SLOTS = 256
PREFILL_TOKENS = 2048  # in one step
# What a step is filled up to (RunnerInfo.fill_tokens). Qwen3-4B's sizes on an H100, ms for 1,024 tokens in
# steps of so many: 512 15.4, 1,024 13.2, 1,152 13.6, 2,048 12.7, 2,176 13.6, 2,304 13.3, 3,072 13.1, 4,096
# 13.1. Beside 31 decode rows a token costs 10.3 µs in a step of 1,024 and 12.0 in one of 2,176.
FILL_TOKENS = (1024, 2048)
MAX_BLOCKS = 1 << 17  # of the default: two million tokens; each costs the host some hundred bytes
RESERVE = 1 << 30  # bytes: scratch of kernels, cuBLASLt's workspace, graphs, staged inputs
CAPTURE_SECONDS = 0.2  # at start: some seven sizes; others while nobody asks, or when they first come


@dataclass(frozen=True)
class Budget:
    """Where a GPU's memory goes, in bytes."""

    total: int
    used: int  # by others and by the CUDA context
    weights: int
    steps: int  # what steps compute in, RESERVE included
    allowed: int  # utilization · total

    @property
    def cache(self) -> int:
        return self.allowed - self.used - self.weights - self.steps

    def __str__(self) -> str:
        parts = {"allowed": self.allowed, "in use": self.used, "weights": self.weights, "steps": self.steps}
        return ", ".join(f"{name} {n / 2**30:.2f}" for name, n in parts.items()) + " GiB"


@dataclass(frozen=True)
class Built:
    runner: CudaRunner
    device: str  # one line
    seconds: dict[str, float]  # by phase


def build_runner(model: Model, info: RunnerInfo, config: EngineConfig, max_logprobs: int) -> Built:
    """Opens the GPU, sizes the cache, loads the weights, captures graphs.

    Args:
        info: its num_blocks are what was asked for, or 0 for all that fits.

    Raises CudaError without a usable GPU or memory, KernelsError without kernels for it, ConfigError where
    the cache cannot hold one sequence.
    """
    from pegainfer.kernels.cuda.backend import CudaBackend
    from pegainfer.kernels.cuda.context import CudaContext
    from pegainfer.kernels.cuda.options import CudaOptions
    from pegainfer.kernels.cuda.store import Dummy

    clock = [time.perf_counter()]
    ctx = CudaContext(config.device_ordinal)
    clock.append(time.perf_counter())
    try:
        max_logprobs = min(max_logprobs, info.vocab_size)
        info = fit(model, info, config, *ctx.device.memory(), max_logprobs)
        dummy = config.load_format == "dummy"
        tensors = model.tensors(info.max_model_len)
        raw = {name: w for name, w in tensors.items() if not dummy or w.data.size}
        backend = CudaBackend(ctx, raw, CudaOptions(graphs=config.cuda_graph), Dummy() if dummy else None)
        runner = prepare(model, info, backend, max_logprobs)
        clock.append(time.perf_counter())
        # The one waits for the disk and the bus, the other for Python: graphs need addresses, not values.
        with ThreadPoolExecutor(1, "weights") as pool:
            loading = pool.submit(backend.load)
            runner.start(CAPTURE_SECONDS)
            clock.append(time.perf_counter())
            loading.result()
    except BaseException:
        ctx.close()
        raise
    clock.append(time.perf_counter())
    phases = ("context", "plan", "graphs", "weights")  # the last: what is left of them then
    seconds = {name: clock[i + 1] - clock[i] for i, name in enumerate(phases)}
    return Built(runner, backend.describe(), seconds)


def prepare(model: Model, info: RunnerInfo, backend: CudaBackend, max_logprobs: int) -> CudaRunner:
    """Takes all memory that steps will need. Then load the backend's weights, then start the runner.

    Raises CudaError where memory is short, UnsupportedError where no kernel serves an op.
    """
    from pegainfer.kernels.cuda.resident import ResidentState
    from pegainfer.kernels.cuda.row_pass import why_launches
    from pegainfer.runner.cuda import CudaRunner
    from pegainfer.runner.parts import Parts
    from pegainfer.runtime.cuda.tensor import DeviceTensor

    programs = model.programs(info, FORMATS, max_logprobs)
    ctx, block_size = backend.ctx, only_group(info.kv).block_size
    blocks = -(-info.max_model_len // block_size)
    state = ResidentState(ctx, info.max_slots, info.max_model_len + 1, blocks, info.max_tokens, block_size)
    pool = DeviceTensor.empty((info.num_blocks[0], *model.block_shape(block_size)), DTYPE, "KV cache")
    largest = largest_step(info)
    bound = {"token_ids": state.token_ids, "block_table": state.block_table}
    forward = backend.prepare(programs["forward"], {"kv": pool}, largest, bound)
    if (reason := why_launches(forward.program.calls, ctx.device.info)) is not None:
        log.info("a step of one row is many launches rather than one, which needs %s", reason)
    logits, x = forward.output("logits", largest), forward.output("x", largest)
    sampler = backend.prepare(programs["sampler"], {"history": state.history}, largest, {"logits": logits})
    prompt_logprobs = backend.prepare(programs["prompt_logprobs"], {}, largest, {"x": x})
    hidden_states = backend.prepare(programs["hidden_states"], {}, largest, {"x": x})
    parts = Parts(
        ctx.device, ctx.stream, forward, sampler, prompt_logprobs, hidden_states, state, pool,
        backend.options.graphs, backend.close,
    )  # fmt: skip
    return CudaRunner(info, parts, max_logprobs)


def fit(
    model: Model, info: RunnerInfo, config: EngineConfig, free: int, total: int, max_logprobs: int
) -> RunnerInfo:
    """`info` with as many blocks as fit, and a length that they hold where none was asked for.

    Raises ConfigError where one sequence does not fit.
    """
    group = only_group(info.kv)
    budget = plan_memory(model, info, config, free, total, max_logprobs)
    need = -(-info.max_model_len // group.block_size)
    room = max(0, budget.cache) // group.bytes_per_block
    blocks = info.num_blocks[0] or min(room, max(need, MAX_BLOCKS))
    if 0 < blocks < need and blocks <= room and config.max_model_len is None:
        length, need = blocks * group.block_size, blocks
        log.warning("max_model_len lowered to %d: the KV cache holds no more (%s)", length, budget)
        tokens = min(info.max_tokens, length + info.max_slots)
        info = msgspec.structs.replace(info, max_model_len=length, max_tokens=tokens)
    if blocks > room or blocks < max(1, need):
        raise ConfigError(
            "the GPU's memory cannot hold the KV cache" if blocks > room
            else "the KV cache cannot hold one sequence of max_model_len tokens",
            expected=f"≥ {max(need, info.num_blocks[0]) * group.bytes_per_block / 2**20:.0f} MiB"
            f" for {info.max_model_len} tokens",
            got=f"{room * group.bytes_per_block / 2**20:.0f} MiB ({budget})",
            remedy="lower --max-model-len or --kv-cache-memory, or raise --gpu-memory-utilization",
        )  # fmt: skip
    return msgspec.structs.replace(info, num_blocks=(blocks,))


def plan_memory(
    model: Model, info: RunnerInfo, config: EngineConfig, free: int, total: int, max_logprobs: int
) -> Budget:
    """Counts all but the cache: weights in their formats here, and the arenas of the recorded programs."""
    one = msgspec.structs.replace(info, num_blocks=(1,))
    programs = model.programs(one, FORMATS, max_logprobs)
    arenas = sum(p.plan_arena(largest_step(info)).size for p in programs.values())
    blocks = -(-info.max_model_len // only_group(info.kv).block_size)
    tables = 4 * info.max_slots * (info.max_model_len + 2 * blocks)  # histories, slots' and a step's tables
    weights = sum(prod(s) * (2 if len(s) > 1 else 4) for s in model.shapes.values())
    weights += 4 * info.max_model_len * model.block_shape(1)[-1]  # the rotation's table
    allowed = int(total * config.gpu_memory_utilization)
    return Budget(total, total - free, weights, arenas + tables + RESERVE, allowed)


def why_not(config: EngineConfig) -> str | None:
    """None where `--device cuda` would find a GPU and kernels for it, else why not, in one line."""
    from pegainfer.contract.errors import PegaError
    from pegainfer.kernels.load import KernelLibrary
    from pegainfer.runtime.cuda.device import Device
    from pegainfer.runtime.cuda.driver import probe

    if (reason := probe()) is not None:
        return reason
    try:
        device = Device.open(config.device_ordinal)
    except PegaError as e:
        return str(e)
    try:
        KernelLibrary(device)
    except PegaError as e:
        return str(e)
    finally:
        device.close()
    return None


def kernel_target(config: EngineConfig, arch: str = "") -> Target:
    """What kernels are chosen for: a card of that architecture, or this machine's GPU and its kernels if ''.

    Raises ConfigError for an unknown architecture, CudaError without a GPU, KernelsError without its kernels.
    """
    from pegainfer.kernels.cuda.context import CudaContext
    from pegainfer.kernels.cuda.target import Target, card_of

    if arch:
        return Target(card_of(arch))
    ctx = CudaContext(config.device_ordinal)
    try:
        return ctx.target
    finally:
        ctx.close()


def describe(config: EngineConfig) -> str:
    """The GPU and where its kernels lie, for `doctor`. Raises CudaError, KernelsError."""
    from pegainfer.kernels.build import stale_units
    from pegainfer.kernels.cuda.context import CudaContext

    ctx = CudaContext(config.device_ordinal)
    try:
        free, _ = ctx.device.memory()
        count = sum(len(u.variants) for u in ctx.library.manifest.units)
        kernels = f"{count} kernels in {ctx.library.folder}"
        if stale := stale_units(ctx.library.manifest):
            kernels += f", {len(stale)} of their sources newer: run `pegainfer kernels build`"
        return f"{ctx.describe()}, {free / 2**30:.1f} GiB free, CUDA {ctx.device.info.driver}; {kernels}"
    finally:
        ctx.close()


def read_bandwidth(config: EngineConfig) -> float:
    """GB/s (10⁹ bytes) that the card's memory can be read with. Raises CudaError, KernelsError."""
    from pegainfer.kernels.cuda.context import CudaContext
    from pegainfer.kernels.cuda.roofline import read_gb_s

    ctx = CudaContext(config.device_ordinal)
    try:
        return read_gb_s(ctx)
    finally:
        ctx.close()
