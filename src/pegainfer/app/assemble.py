"""From model files and options to a Runner: opens, sizes the KV cache, packs, and says how long each took."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from pegainfer.app.config import EngineConfig
from pegainfer.app.registry import HF_NAMES, Model, ModelLine, find_line
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.handle import EngineInfo
from pegainfer.contract.step import KVSpec, PageGroup, Runner, RunnerInfo
from pegainfer.engine.config import SchedulerConfig
from pegainfer.ops.backend import Backend, ReferenceBackend
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.jsonfile import parse_object, read_small_file
from pegainfer.runtime.weights.raw import RawWeight
from pegainfer.runtime.weights.safetensors import open_safetensors

if TYPE_CHECKING:
    from pegainfer.kernels.cpu.backend import CpuOptions
    from pegainfer.kernels.profile import Profiler

log = logging.getLogger(__name__)

BLOCK_SIZE = 16  # tokens
DEFAULT_SLOTS = 64
# Prefill is as quick in pieces of 64 as of 512 tokens (608 to 619 tokens a CPU second with the default model,
# AVX-512), and decodes in the same step wait for the piece.
DEFAULT_PREFILL_TOKENS = 128
MAX_KV_BYTES = 1 << 30  # of the default; more where one sequence needs more
MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class Engine:
    """A model ready to be scheduled."""

    runner: Runner
    info: EngineInfo


@contextlib.contextmanager
def open_model(path: Path, load_format: str = "auto") -> Iterator[tuple[Model, str]]:
    """A model and its architecture's name. Its weights stay mapped until the context ends.

    Args:
        path: a .gguf file or a checkpoint's folder.
        load_format: as EngineConfig has it; 'dummy' reads a folder's config.json alone.

    Raises ConfigError, ModelFileError, UnsupportedError.
    """
    if load_format == "dummy":
        if not path.is_dir():
            raise ConfigError("dummy weights need a config.json", expected="a folder", got=path)
        line, architecture, config, where = read_config(path)
        yield line.from_config(config, where), architecture
    elif path.is_dir():
        line, architecture, config, where = read_config(path)
        with open_safetensors(path) as checkpoint:
            yield line.from_hf(config, where, checkpoint), architecture
    else:
        with GGUFFile(path) as file:
            name = file.metadata.get("general.architecture")
            line = find_line(name, str(path))
            yield line.from_gguf(file), HF_NAMES.get(str(name), str(name))


def read_config(path: Path) -> tuple[ModelLine, str, dict[str, Any], str]:
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
    with open_model(path, config.load_format) as (model, architecture):
        info = runner_info(model, config, scheduler)
        read = time.perf_counter()
        runner, device, phases = _build_runner(model, info, config, scheduler, profiler)
    seconds = {"read": read - started, **phases}
    told = engine_info(runner.info, name, architecture, device, scheduler.max_logprobs, seconds)
    return Engine(runner, told)


def engine_info(
    info: RunnerInfo,
    model: str,
    architecture: str,
    device: str,
    max_logprobs: int,
    startup_seconds: Mapping[str, float] = MappingProxyType({}),
) -> EngineInfo:
    """What the front is told of an engine over a runner with these bounds; see EngineInfo."""
    group = info.kv.groups[0]
    return EngineInfo(
        model=model,
        architecture=architecture,
        device=device,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        block_size=group.block_size if isinstance(group, PageGroup) else 0,
        num_blocks=info.num_blocks[0],
        max_slots=info.max_slots,
        max_logprobs=max_logprobs,
        startup_seconds=dict(startup_seconds),
    )


def _build_runner(
    model: Model,
    info: RunnerInfo,
    config: EngineConfig,
    scheduler: SchedulerConfig,
    profiler: Profiler | None,
) -> tuple[Runner, str, dict[str, float]]:
    """The runner, how its device is described, and seconds by phase."""
    if config.backend == "cuda":
        from pegainfer.app.gpu import build_runner

        built = build_runner(model, info, config, scheduler.max_logprobs)
        return built.runner, built.device, built.seconds
    started = time.perf_counter()
    backend, device = make_backend(model.tensors(info.max_model_len), config, timing=profiler is not None)
    backend = backend if profiler is None else profiler.around(backend)
    runner = model.build(info, backend, kv_dtype=config.kv_format, max_logprobs=scheduler.max_logprobs)
    return runner, device, {"pack": time.perf_counter() - started}


def runner_info(model: Model, config: EngineConfig, scheduler: SchedulerConfig) -> RunnerInfo:
    """Bounds of the runner: what was asked for, or defaults that fit the machine. Raises ConfigError.

    On a GPU num_blocks is 0 unless a size was asked for: app/gpu.py fills its memory.
    """
    kv = model.kv_spec(BLOCK_SIZE, config.kv_format)
    block_bytes = sum(g.bytes_per_block for g in kv.groups if isinstance(g, PageGroup))
    length = config.max_model_len or model.max_position_embeddings
    if length > model.max_position_embeddings:
        raise ConfigError(
            "max_model_len exceeds what the model was trained for",
            expected=f"≤ {model.max_position_embeddings}",
            got=length,
        )
    if config.backend == "cuda":
        return _gpu_info(model, kv, length, (config.kv_cache_memory or 0) // block_bytes, scheduler)
    need = -(-length // BLOCK_SIZE) * block_bytes
    free = available_memory()
    budget = config.kv_cache_memory or max(min(MAX_KV_BYTES, free // 4), min(need, free // 2))
    if need > budget and config.max_model_len is None and budget >= block_bytes:
        length = budget // block_bytes * BLOCK_SIZE
        log.warning("max_model_len lowered to %d: the KV cache of %d MiB holds no more", length, budget >> 20)
    elif need > budget:
        raise ConfigError(
            "the KV cache cannot hold one sequence of max_model_len tokens",
            expected=f"≥ {need / 2**20:.2f} MiB for {length} tokens",
            got=f"{budget / 2**20:.2f} MiB",
            remedy="raise kv_cache_memory or lower max_model_len",
        )
    slots = scheduler.max_slots or DEFAULT_SLOTS
    prefill = min(scheduler.max_prefill_tokens or DEFAULT_PREFILL_TOKENS, length)
    return RunnerInfo(
        kv=kv,
        num_blocks=(budget // block_bytes,),
        max_slots=slots,
        max_tokens=prefill + slots,
        max_model_len=length,
        vocab_size=model.vocab_size,
        supports_pooling=True,
    )


def _gpu_info(model: Model, kv: KVSpec, length: int, blocks: int, scheduler: SchedulerConfig) -> RunnerInfo:
    from pegainfer.app.gpu import FILL_TOKENS, PREFILL_TOKENS, SLOTS

    slots = scheduler.max_slots or SLOTS
    asked = scheduler.max_prefill_tokens
    max_tokens = min(asked or PREFILL_TOKENS, length) + slots
    return RunnerInfo(
        kv=kv,
        num_blocks=(blocks,),
        max_slots=slots,
        max_tokens=max_tokens,
        fill_tokens=() if asked else tuple(n for n in FILL_TOKENS if n <= max_tokens),
        max_model_len=length,
        vocab_size=model.vocab_size,
        supports_pooling=True,
    )


def make_backend(
    tensors: Mapping[str, RawWeight], config: EngineConfig, *, timing: bool = False
) -> tuple[Backend, str]:
    """The backend that holds these weights, and how it describes its device.

    Args:
        timing: the CPU's executors keep how long each call takes.

    Raises ConfigError for options that this machine cannot serve, UnsupportedError without a built library.
    """
    if config.backend == "reference":
        return ReferenceBackend(tensors), "reference (NumPy)"
    from pegainfer.kernels.cpu.backend import CpuBackend

    backend = CpuBackend(tensors, cpu_options(config, timing=timing))
    return backend, backend.describe()


def cpu_options(config: EngineConfig, *, timing: bool = False) -> CpuOptions:
    """What the CPU's kernels are asked for, with 'auto' decided."""
    from pegainfer.kernels.cpu.backend import Activation, CpuOptions

    return CpuOptions(
        threads=config.threads or 0,
        isa=config.isa,
        activation=cast(Activation, "bf16" if config.activation == "auto" else config.activation),
        timing=timing,
    )


def available_memory() -> int:
    """Bytes that the system can give without swapping, and that this process's control group allows."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for row in Path("/proc/meminfo").read_text().splitlines():
            if row.startswith("MemAvailable:"):
                free = int(row.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # another system, or no control group: what the C library says
    return free
