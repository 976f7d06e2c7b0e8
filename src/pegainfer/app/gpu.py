"""From an open model to a Runner on a GPU: weights, graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pegainfer.app.bounds import step_formats
from pegainfer.app.config import EngineConfig
from pegainfer.app.gpu_memory import fit, plan_memory, quicker_form
from pegainfer.app.open_tiers import with_tiers
from pegainfer.app.registry import Model
from pegainfer.app.tiers import tiers_of_rank
from pegainfer.contract.peers import PeerSide
from pegainfer.contract.step import RunnerInfo
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.runtime.cuda.packed import OF_FORMAT
from pegainfer.runtime.weights.weight import Weight

if TYPE_CHECKING:
    from pegainfer.lower.cuda.context import CudaContext
    from pegainfer.lower.cuda.target import Target
    from pegainfer.runner.cuda import CudaRunner
    from pegainfer.runtime.rank_memory import RankMemory

log = logging.getLogger(__name__)

PLAIN = ("f32", "f16", "bf16")
CAPTURE_SECONDS = 0.2  # at start: some seven sizes; others while nobody asks, or when they first come


@dataclass(frozen=True)
class Built:
    runner: CudaRunner
    device: str  # one line
    seconds: dict[str, float]  # by phase
    peers: PeerSide | None  # connections to other engines


def build_runner(
    model: Model,
    path: Path,
    groups: tuple[GroupLayout, ...],
    info: RunnerInfo,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    at: TensorRank = ONE_RANK,
    memory: RankMemory | None = None,
    start: Callable[[RunnerInfo], None] | None = None,
) -> Built:
    """Opens the GPU, sizes the cache, loads the weights, captures graphs, meets the other ranks.

    Args:
        path: of the model's file or folder.
        info: bounds as they were asked for; rank 0 divides the cache here.
        at: the rank whose part `model` is.
        memory: of the group of ranks; closed with the runner, or where this raises.
        start: called with the bounds once they are known.

    Raises CudaError without a usable GPU or memory, KernelsError without kernels for it, ConfigError where
    the cache cannot hold one sequence.
    """
    from pegainfer.lower.cuda.context import CudaContext
    from pegainfer.lower.cuda.fp8 import keeps_fp8

    clock = [time.perf_counter()]
    ctx = CudaContext(config.ordinal_of(at.rank), group=memory)
    clock.append(time.perf_counter())
    try:
        if at.rank == 0:
            most = min(scheduler.max_logprobs, info.vocab_size)
            fp8 = keeps_fp8(ctx.target)
            budget = plan_memory(model, groups, info, config, *_memory(ctx, config), most, fp8=fp8)
            model, budget = quicker_form(model, groups, budget, info.max_model_len, config, fp8=fp8)
            info = fit(model, groups, budget, config, scheduler)
        if start is not None:
            start(info)
        runner, peers = _load(ctx, model, path, groups, info, config, scheduler, at, clock)
    except BaseException:
        ctx.close()
        raise
    clock.append(time.perf_counter())
    phases = ("context", "plan", "graphs", "weights")  # the last: what is left of them then
    seconds = {name: clock[i + 1] - clock[i] for i, name in enumerate(phases)}
    return Built(runner, ctx.describe(), seconds, peers)


def log_expanded(weights: Mapping[str, Weight], *, fp8: bool) -> None:
    """Logs quantised matrices that take 16 bits a weight, because no kernel takes them in another form.

    Those are matrices whose format has no packed form, and the stacks of experts in any format.

    fp8: whether the GPU keeps FP8 matrices.
    """
    kept = (*PLAIN, *OF_FORMAT, *(("fp8_r128", "fp8_g128") if fp8 else ()))
    many = [w for w in weights.values() if len(w.shape) > 1]
    found = [w.dtype for w in many if w.dtype not in (kept if len(w.shape) == 2 else PLAIN)]
    if found:
        names = " ".join(sorted(set(found)))
        log.info("%d weights in %s are expanded to bf16: no kernel takes them packed", len(found), names)


def _load(
    ctx: CudaContext,
    model: Model,
    path: Path,
    groups: tuple[GroupLayout, ...],
    info: RunnerInfo,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    at: TensorRank,
    clock: list[float],
) -> tuple[CudaRunner, PeerSide | None]:
    """`build_runner` on an open GPU, with decided bounds: the runner, and connections to other engines.

    Adds to `clock` the ends of planning and graphs.
    """
    from pegainfer.kv.device.cuda_copies import PinnedMemory
    from pegainfer.lower.cuda.backend import CudaBackend
    from pegainfer.lower.cuda.fp8 import keeps_fp8
    from pegainfer.lower.cuda.options import CudaOptions
    from pegainfer.lower.cuda.row_pass import why_launches
    from pegainfer.lower.cuda.store import Dummy

    dummy = Dummy() if config.load_format == "dummy" else None
    weights = model.tensors(info.max_model_len)
    log_expanded(weights, fp8=keeps_fp8(ctx.target))
    backend = CudaBackend(ctx, weights, CudaOptions(graphs=config.cuda_graph), dummy)
    max_logprobs = min(scheduler.max_logprobs, info.vocab_size)
    pinned = PinnedMemory(ctx.device)
    with tiers_of_rank(config, scheduler, groups, path, at, pinned) as tiers:
        info = with_tiers(info, tiers)
        steps = step_formats(config)
        runner = model.build_cuda(info, groups, backend, steps=steps, max_logprobs=max_logprobs)
        if (reason := why_launches(runner.forward_program.calls, ctx.target)) is not None:
            log.info("a step of one row takes many launches instead of one, which would need %s", reason)
        clock.append(time.perf_counter())
        # The one waits for the disk and the bus, the other for Python: graphs need addresses, no values.
        with ThreadPoolExecutor(1, "weights") as pool:
            loading = pool.submit(backend.load)
            runner.start(CAPTURE_SECONDS)
            clock.append(time.perf_counter())
            loading.result()
        ctx.connect()
        tiers.give_to(runner)
    return runner, tiers.peers


def _memory(ctx: CudaContext, config: EngineConfig) -> tuple[int, int]:
    """(free, total) bytes of the GPU for this rank."""
    free, total = ctx.device.memory()
    share = total // config.tensor_parallel_size if config.share_gpu else total
    return max(0, free - (total - share)), share


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
    from pegainfer.lower.cuda.context import CudaContext
    from pegainfer.lower.cuda.target import Target, card_of

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
    from pegainfer.lower.cuda.context import CudaContext

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
    from pegainfer.lower.cuda.context import CudaContext
    from pegainfer.measure.cuda.roofline import read_gb_s

    ctx = CudaContext(config.device_ordinal)
    try:
        return read_gb_s(ctx)
    finally:
        ctx.close()
