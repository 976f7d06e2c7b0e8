"""Opens a model's files for one rank, and makes the backend that holds its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pegainfer.app.config import EngineConfig
from pegainfer.app.known_ids import known_ids, known_ids_of_gguf
from pegainfer.app.registry import HF_NAMES, Model, ModelLine, find_line
from pegainfer.contract.errors import ConfigError
from pegainfer.ops.backend import Backend, ReferenceBackend
from pegainfer.ops.kv_scales import read_kv_scales
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.runtime.weights.gguf_split import open_gguf
from pegainfer.runtime.weights.jsonfile import parse_object, read_small_file
from pegainfer.runtime.weights.safetensors import open_safetensors
from pegainfer.runtime.weights.weight import Weight

if TYPE_CHECKING:
    from pegainfer.lower.cpu.backend import CpuOptions
    from pegainfer.runtime.rank_memory import RankMemory

MAX_CONFIG_BYTES = 16 << 20


@contextlib.contextmanager
def open_model(
    path: Path,
    load_format: str = "auto",
    at: TensorRank = ONE_RANK,
    quantization: str | None = None,
    *,
    tokenizer: Path | None = None,
) -> Iterator[tuple[Model, str]]:
    """A model and its architecture's name. Its weights stay mapped until the context ends.

    Its vocabulary is bounded to the ids that its tokenizer has; without a tokenizer the head's rows count.

    Args:
        path: a .gguf file, any part of a split one, or a checkpoint's folder.
        load_format: as EngineConfig has it; 'dummy' reads a folder's config.json alone.
        at: the rank whose part is wanted.
        quantization: how plain matrices are quantised while they are loaded; None: not at all.
        tokenizer: folder or .gguf file whose tokenizer takes the place of the model's own.

    Raises ConfigError, ModelFileError, OpError, UnsupportedError.
    """
    with _open(path, load_format, at, tokenizer) as (model, architecture):
        yield (model if quantization is None else model.quantized(quantization)), architecture


@contextlib.contextmanager
def _open(
    path: Path, load_format: str, at: TensorRank, tokenizer: Path | None
) -> Iterator[tuple[Model, str]]:
    """`open_model` without quantisation."""
    if load_format == "dummy":
        if not path.is_dir():
            raise ConfigError("dummy weights need a config.json", expected="a folder", got=path)
        line, architecture, config, where = read_config(path)
        yield _bounded(line.from_config(config, where, at), known_ids(tokenizer or path)), architecture
    elif path.is_dir():
        line, architecture, config, where = read_config(path)
        with open_safetensors(path) as checkpoint:
            model = line.from_hf(config, where, checkpoint, at).scaled(read_kv_scales(config, checkpoint))
            yield _bounded(model, known_ids(tokenizer or path)), architecture
    else:
        with open_gguf(path) as file:
            name = file.metadata.get("general.architecture")
            line = find_line(name, str(path))
            ids = known_ids(tokenizer) if tokenizer else known_ids_of_gguf(file.metadata)
            yield _bounded(line.from_gguf(file, at), ids), HF_NAMES.get(str(name), str(name))


def _bounded(model: Model, ids: int | None) -> Model:
    return model.bounded(ids) if ids else model


def read_config(path: Path) -> tuple[ModelLine, str, dict[str, Any], str]:
    """The line of a folder's config.json, its architecture, what it says, and its path for errors."""
    where = path / "config.json"
    config = parse_object(read_small_file(where, MAX_CONFIG_BYTES), str(where))
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else names
    return find_line(architecture, str(where)), str(architecture), config, str(where)


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
