"""From model files and options to a Runner: opens, sizes the KV cache, packs, and says how long each took."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from pegainfer.app.bounds import model_groups, runner_info, step_formats
from pegainfer.app.config import EngineConfig
from pegainfer.app.registry import HF_NAMES, Model, ModelLine, find_line
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.handle import EngineInfo
from pegainfer.contract.step import PageGroup, Runner, RunnerInfo, StepPolicy
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.scheduler import Scheduler
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.ops.backend import Backend, ReferenceBackend
from pegainfer.ops.weights import ONE_RANK, TensorRank
from pegainfer.runtime.weights.gguf_split import open_gguf
from pegainfer.runtime.weights.jsonfile import parse_object, read_small_file
from pegainfer.runtime.weights.safetensors import open_safetensors
from pegainfer.runtime.weights.weight import Weight

if TYPE_CHECKING:
    from pegainfer.lower.cpu.backend import CpuOptions
    from pegainfer.measure.profile import Profiler
    from pegainfer.runtime.rank_memory import RankMemory

log = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 16 << 20

MakePolicy = Callable[[RunnerInfo, SchedulerConfig], StepPolicy]


@dataclass(frozen=True)
class Engine:
    """A model ready to be scheduled.

    Args:
        make_policy: the line's own scheduling policy; None: the default scheduler.
    """

    runner: Runner
    info: EngineInfo
    make_policy: MakePolicy | None = None

    def policy(self, config: SchedulerConfig) -> StepPolicy:
        """The policy that schedules this engine's steps."""
        return (self.make_policy or Scheduler)(self.runner.info, config)


@contextlib.contextmanager
def open_model(
    path: Path, load_format: str = "auto", at: TensorRank = ONE_RANK
) -> Iterator[tuple[Model, str]]:
    """A model and its architecture's name. Its weights stay mapped until the context ends.

    Args:
        path: a .gguf file, any part of a split one, or a checkpoint's folder.
        load_format: as EngineConfig has it; 'dummy' reads a folder's config.json alone.
        at: the rank whose part is wanted.

    Raises ConfigError, ModelFileError, OpError, UnsupportedError.
    """
    if load_format == "dummy":
        if not path.is_dir():
            raise ConfigError("dummy weights need a config.json", expected="a folder", got=path)
        line, architecture, config, where = _read_config(path)
        yield line.from_config(config, where), architecture
    elif path.is_dir():
        line, architecture, config, where = _read_config(path)
        with open_safetensors(path) as checkpoint:
            yield line.from_hf(config, where, checkpoint, at), architecture
    else:
        with open_gguf(path) as file:
            name = file.metadata.get("general.architecture")
            line = find_line(name, str(path))
            yield line.from_gguf(file, at), HF_NAMES.get(str(name), str(name))


def _read_config(path: Path) -> tuple[ModelLine, str, dict[str, Any], str]:
    """The line of a folder's config.json, its architecture, what it says, and its path for errors."""
    where = path / "config.json"
    config = parse_object(read_small_file(where, MAX_CONFIG_BYTES), str(where))
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else names
    return find_line(architecture, str(where)), str(architecture), config, str(where)


def build_engine(
    path: Path,
    name: str,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    profiler: Profiler | None = None,
) -> Engine:
    """Loads a model and makes it ready; the caller closes the runner.

    Args:
        path: a .gguf file or a folder with config.json and safetensors.
        name: what the model is called in answers.
        profiler: is put around the backend, whose calls are timed then.

    Raises ConfigError, ModelFileError, UnsupportedError.
    """
    config.check_backend()
    started = time.perf_counter()
    at = TensorRank(0, config.tensor_parallel_size)
    with open_model(path, config.load_format, at) as (model, architecture):
        groups = model_groups(model, config)
        info = runner_info(model, config, scheduler)
        read = time.perf_counter()
        runner, device, phases = _build_runner(model, path, groups, info, config, scheduler, profiler)
    seconds = {"read": read - started, **phases}
    told = engine_info(runner.info, name, architecture, device, scheduler.max_logprobs, seconds)
    return Engine(runner, told, model.make_policy)


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
    path: Path,
    groups: tuple[GroupLayout, ...],
    info: RunnerInfo,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    profiler: Profiler | None,
) -> tuple[Runner, str, dict[str, float]]:
    """The runner, how its device is described, and seconds by phase."""
    if config.backend == "cuda":
        from pegainfer.app.gpu import build_runner

        built = build_runner(model, groups, info, config, scheduler)
        return built.runner, built.device, built.seconds
    started = time.perf_counter()
    device = ""

    def build(memory: RankMemory | None = None) -> Runner:
        nonlocal device
        tensors = model.tensors(info.max_model_len)
        backend, device = make_backend(tensors, config, timing=profiler is not None, memory=memory)
        backend = backend if profiler is None else profiler.around(backend)
        formats, max_logprobs = step_formats(config), scheduler.max_logprobs
        return model.build(info, groups, backend, steps=formats, max_logprobs=max_logprobs)

    if config.tensor_parallel_size == 1:
        runner = build()
    else:
        from pegainfer.app.ranks import cpu_ranks

        runner = cpu_ranks(build, path, info, config, scheduler)
    return runner, device, {"pack": time.perf_counter() - started}


def make_backend(
    tensors: Mapping[str, Weight],
    config: EngineConfig,
    *,
    timing: bool = False,
    memory: RankMemory | None = None,
) -> tuple[Backend, str]:
    """The backend that holds these weights, and how it describes its device.

    Args:
        timing: the CPU's executors keep how long each call takes.
        memory: of the group, where this is one of several ranks.

    Raises ConfigError for options that this machine cannot serve, UnsupportedError without a built library.
    """
    if config.backend == "reference":
        return ReferenceBackend(tensors), "reference (NumPy)"
    from pegainfer.lower.cpu.backend import CpuBackend

    backend = CpuBackend(tensors, cpu_options(config, timing=timing), memory)
    return backend, backend.describe()


def cpu_options(config: EngineConfig, *, timing: bool = False) -> CpuOptions:
    """What the CPU's kernels are asked for, with 'auto' decided."""
    from pegainfer.lower.cpu.backend import Activation, CpuOptions
    from pegainfer.lower.cpu.threads import usable_cores

    ranks = config.tensor_parallel_size
    return CpuOptions(
        threads=config.threads or max(1, usable_cores() // ranks),
        isa=config.isa,
        activation=cast(Activation, "bf16" if config.activation == "auto" else config.activation),
        timing=timing,
    )
