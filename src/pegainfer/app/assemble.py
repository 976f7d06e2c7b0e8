"""From model files and options to a Runner: opens, sizes the KV cache, packs, and says how long each took."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from pegainfer.app.bounds import model_groups, runner_info, step_formats
from pegainfer.app.config import EngineConfig
from pegainfer.app.fitting import check_fits, need_of
from pegainfer.app.kv_events import publish_to, read_config
from pegainfer.app.load import make_backend, open_model
from pegainfer.app.open_tiers import with_tiers
from pegainfer.app.registry import Model
from pegainfer.app.tiers import check_role, tiers_of_rank
from pegainfer.contract.handle import EngineInfo
from pegainfer.contract.peers import PeerSide
from pegainfer.contract.step import PageGroup, Runner, RunnerInfo, StepPolicy
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.scheduler import Scheduler
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.runtime.control_groups import available_memory
from pegainfer.runtime.weights.made_up import made_up

if TYPE_CHECKING:
    from pegainfer.measure.profile import Profiler
    from pegainfer.runtime.rank_memory import RankMemory

log = logging.getLogger(__name__)

MakePolicy = Callable[[RunnerInfo, SchedulerConfig], StepPolicy]


class Engine(msgspec.Struct, frozen=True):
    """A model ready to be scheduled.

    Args:
        make_policy: the line's own scheduling policy; None: the default scheduler.
        peers: connections to other engines, which the engine's loop closes; None: there are none.
        kv_events: EngineConfig's `kv_events_config`.
    """

    runner: Runner
    info: EngineInfo
    make_policy: MakePolicy | None = None
    peers: PeerSide | None = None
    kv_events: str = ""

    def policy(self, config: SchedulerConfig) -> StepPolicy:
        """The policy that schedules this engine's steps. Raises ConfigError, UnsupportedError."""
        policy = (self.make_policy or Scheduler)(self.runner.info, config)
        if self.kv_events:
            publish_to(policy, self.kv_events)
        return policy


def build_engine(
    path: Path,
    name: str,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    profiler: Profiler | None = None,
    *,
    tokenizer: Path | None = None,
) -> Engine:
    """Loads a model and makes it ready; the caller closes the runner.

    Args:
        path: a .gguf file or a folder with config.json and safetensors.
        name: what the model is called in answers.
        profiler: is put around the backend, whose calls are timed then.
        tokenizer: takes the place of the model's own, see `open_model`.

    Raises ConfigError, ModelFileError, UnsupportedError.
    """
    config.check_backend()
    read_config(config.kv_events_config)  # a bad value is refused before the model is loaded
    started = time.perf_counter()
    at = config.place_of(0)
    with contextlib.ExitStack() as opened:
        reading = open_model(path, config.load_format, at, config.quantization, tokenizer=tokenizer)
        model, architecture = opened.enter_context(reading)
        groups = model_groups(model, config)
        info = runner_info(model, config, scheduler)
        read = time.perf_counter()
        runner, device, phases, peers = _build_runner(
            model, (path, tokenizer), groups, info, config, scheduler, profiler
        )
    seconds = {"read": read - started, **phases}
    told = engine_info(runner.info, name, architecture, device, scheduler.max_logprobs, seconds)
    return Engine(runner, told, model.make_policy, peers, config.kv_events_config)


def engine_info(
    info: RunnerInfo,
    model: str,
    architecture: str,
    device: str,
    max_logprobs: int,
    startup_seconds: Mapping[str, float] = MappingProxyType({}),
) -> EngineInfo:
    """What the front is told of an engine over a runner with these bounds; see EngineInfo."""
    # Prompts are hashed by the smallest block of all groups, see kv/manager.py.
    pages = [(g.block_size, n) for g, n in zip(info.kv.groups, info.num_blocks, strict=True)
             if isinstance(g, PageGroup)]  # fmt: skip
    block_size, num_blocks = min(pages, default=(0, info.num_blocks[0]))
    return EngineInfo(
        model=model,
        architecture=architecture,
        device=device,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        block_size=block_size,
        num_blocks=num_blocks * info.data_ranks,
        max_slots=info.max_slots,
        max_logprobs=max_logprobs,
        max_adapters=info.max_adapters,
        startup_seconds=dict(startup_seconds),
    )


def _build_runner(
    model: Model,
    files: tuple[Path, Path | None],
    groups: tuple[GroupLayout, ...],
    info: RunnerInfo,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    profiler: Profiler | None,
) -> tuple[Runner, str, dict[str, float], PeerSide | None]:
    """The runner, how its device is described, seconds by phase, and connections to peers.

    `files`: the model's path, and that of the tokenizer that takes the place of its own.
    """
    if config.backend == "cuda":
        return _build_on_gpus(model, files, groups, info, config, scheduler)
    started = time.perf_counter()
    check_fits(need_of(model, groups, info, config.tensor_parallel_size), available_memory())
    device = ""
    peers: PeerSide | None = None

    def build(memory: RankMemory | None = None) -> Runner:
        nonlocal device, peers
        tensors = model.tensors(info.max_model_len)
        if config.load_format == "dummy":
            tensors = {name: w if w.parts else made_up(name, w) for name, w in tensors.items()}
        timing = profiler is not None
        backend, device = make_backend(tensors, config, timing=timing, memory=memory)
        backend = backend if profiler is None else profiler.around(backend)
        formats, max_logprobs = step_formats(config), scheduler.max_logprobs
        at = config.place_of(0)
        with tiers_of_rank(config, scheduler, groups, files[0], at) as tiers:
            bounds = with_tiers(info, tiers)
            runner = model.build(bounds, groups, backend, steps=formats, max_logprobs=max_logprobs)
            tiers.give_to(runner)
            peers = tiers.peers
        return runner

    if config.tensor_parallel_size == 1:
        runner = build()
    else:
        from pegainfer.app.ranks import rank_processes

        check_role(config, scheduler)

        def build_first(memory: RankMemory, start: Callable[[RunnerInfo], None]) -> Runner:
            start(info)
            return build(memory)

        runner = rank_processes(build_first, files, groups, config, scheduler)
    return runner, device, {"pack": time.perf_counter() - started}, peers


def _build_on_gpus(
    model: Model,
    files: tuple[Path, Path | None],
    groups: tuple[GroupLayout, ...],
    info: RunnerInfo,
    config: EngineConfig,
    scheduler: SchedulerConfig,
) -> tuple[Runner, str, dict[str, float], PeerSide | None]:
    """`_build_runner` for one GPU, or for one a rank."""
    from pegainfer.app.gpu import Built, build_runner
    from pegainfer.app.ranks import rank_processes

    at = config.place_of(0)
    build = partial(build_runner, model, files[0], groups, info, config, scheduler, at)
    if at.ranks == 1:
        built = build()
        return built.runner, built.device, built.seconds, built.peers
    check_role(config, scheduler)
    first: list[Built] = []

    def build_first(memory: RankMemory, start: Callable[[RunnerInfo], None]) -> Runner:
        first.append(build(memory, start))
        return first[0].runner

    runner = rank_processes(build_first, files, groups, config, scheduler)
    return runner, f"{at.ranks} ranks of {first[0].device}", first[0].seconds, first[0].peers
