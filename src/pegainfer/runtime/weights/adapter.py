"""The factors of a LoRA adapter's folder, checked against the modules of the model that it adapts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.jsonfile import parse_object, read_small_file
from pegainfer.runtime.weights.peft import PeftConfig
from pegainfer.runtime.weights.safetensors import SafetensorsFile
from pegainfer.runtime.weights.tensorfile import TensorFile

Array = np.ndarray[Any, Any]
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
PREFIX = "base_model.model."
FORMATS = ("f32", "bf16", "f16")
# Checkpoints with a vision tower have the text model a level deeper than those without.
TEXT_MODEL = ("model.language_model.", "model.")


@dataclass(frozen=True)
class BaseModule:
    """A module of the base that may have factors: a matrix [rows, columns].

    Args:
        embedding: a lookup of the matrix's rows, [V, M].
    """

    rows: int
    columns: int
    embedding: bool = False


@dataclass(frozen=True)
class Factors:
    """What one module adds: up · down · x.

    Args:
        down: [r, K] float32; of an embedding [r, V].
        up: [N, r] float32, with the module's scale in it; of an embedding [M, r].
    """

    down: Array
    up: Array


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter in memory.

    Args:
        digest: SHA-256 of config and weights; equal digests compute the same.
        rank: the greatest of all modules.
        factors: by the module's name.
    """

    digest: bytes
    rank: int
    factors: Mapping[str, Factors]


def read_adapter(folder: Path, modules: Mapping[str, BaseModule], max_rank: int) -> LoraAdapter:
    """Reads an adapter's folder.

    Args:
        modules: of the base, by the names that its checkpoint has.
        max_rank: the greatest rank that is served.

    Raises ModelFileError, and UnsupportedError for what is not served; nothing is kept then.
    """
    where = folder / CONFIG_NAME
    raw = read_small_file(where, MAX_CONFIG_BYTES)
    config = PeftConfig.read(parse_object(raw, str(where)), str(where))
    if not (folder / WEIGHTS_NAME).is_file():
        raise ModelFileError(
            f"the adapter has no {WEIGHTS_NAME}", where=folder,
            remedy="save it with PEFT's safe_serialization=True",
        )  # fmt: skip
    with SafetensorsFile(folder / WEIGHTS_NAME) as file:
        factors = _Reader(file, config, modules, max_rank).read()
        digest = hashlib.sha256(hashlib.sha256(raw).digest())
        digest.update(file.view().data)
    rank = max(f.down.shape[0] for f in factors.values())
    return LoraAdapter(digest.digest(), rank, factors)


class _Reader:
    """One adapter's tensors and what is wanted of them."""

    def __init__(
        self, file: TensorFile, config: PeftConfig, modules: Mapping[str, BaseModule], max_rank: int
    ) -> None:
        self._file, self._config, self._max_rank = file, config, max_rank
        self._modules = modules
        nested = any(name.startswith(PREFIX + TEXT_MODEL[0]) for name in file.tensors)
        self._spelled = {name: _spelled(name, nested=nested) for name in modules}  # as PEFT saw the base
        self._left = set(file.tensors)

    def read(self) -> dict[str, Factors]:
        found = {
            name: self._factors(name, module)
            for name, module in self._modules.items()
            if self._config.adapts(self._spelled[name])
        }
        if self._left:
            raise self._refusal(min(self._left))
        if not found:
            raise ModelFileError(
                "the adapter adapts no module of this model", expected=" ".join(list(self._modules)[:8]),
                got=self._config.targets, where=self._file.path,
            )  # fmt: skip
        return found

    def _factors(self, name: str, module: BaseModule) -> Factors:
        spelled = self._spelled[name]
        rank = self._config.rank_of(spelled)
        if rank > self._max_rank:
            raise UnsupportedError(
                f"the adapter's rank at {spelled} is above what this engine serves",
                expected=f"at most {self._max_rank}", got=rank, where=self._file.path,
                remedy="start it with a greater --max-lora-rank",
            )  # fmt: skip
        names = ("lora_embedding_A", "lora_embedding_B") if module.embedding else (
            "lora_A.weight", "lora_B.weight")  # fmt: skip
        rows, columns = module.rows, module.columns
        shapes = ((rank, rows), (columns, rank)) if module.embedding else ((rank, columns), (rows, rank))
        down, up = (
            self._tensor(f"{PREFIX}{spelled}.{part}", shape)
            for part, shape in zip(names, shapes, strict=True)
        )
        return Factors(down, up * np.float32(self._config.scale_of(spelled)))

    def _tensor(self, name: str, shape: tuple[int, int]) -> Array:
        info = self._file.tensors.get(name)
        if info is None:
            raise ModelFileError(
                f"the adapter has no tensor {name}", expected="factors of every module that its config names",
                where=self._file.path,
            )  # fmt: skip
        self._left.discard(name)
        if info.shape != shape:
            raise ModelFileError(
                f"tensor {name} contradicts the model or the adapter's config",
                expected=list(shape), got=list(info.shape), where=self._file.path,
            )  # fmt: skip
        if info.format not in FORMATS:
            raise UnsupportedError(
                f"tensor {name}: format of an adapter", expected=" ".join(FORMATS), got=info.format,
                where=self._file.path,
            )  # fmt: skip
        values = dequantize(info.format, self._file.part(name).bytes(), shape)
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {name} has values that are not finite", where=self._file.path)
        return values

    def _refusal(self, name: str) -> UnsupportedError:
        """Of a tensor that belongs to no module that the config and the model both have."""
        module = re.sub(r"(\.base_layer)?\.(lora_.*|weight)$", "", name.removeprefix(PREFIX))
        if ".lora_" not in name:
            reason = "it replaces a weight of the base"
        elif module in self._spelled.values():
            reason = "the adapter's config does not name the module"
        else:
            reason = "this model has no such linear module"
        return UnsupportedError(
            f"tensor {name} of the adapter is not served: {reason}",
            expected="factors of " + " ".join(list(self._spelled.values())[:8]) + " …",
            where=self._file.path,
        )


def _spelled(module: str, *, nested: bool) -> str:
    """The module's name with the prefix of the text model that an adapter has, of a nested one or not."""
    deep, flat = TEXT_MODEL
    rest = module.removeprefix(deep) if module.startswith(deep) else module.removeprefix(flat)
    if rest == module:  # the head is outside of the text model
        return module
    return (deep if nested else flat) + rest
