"""The factors of a LoRA adapter's folder, checked against the modules of the model that it adapts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
THREADS = 4  # that read an adapter
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
        down: [r, K] float32, or the bits of bf16 as uint16; of an embedding [r, V].
        up: [N, r] likewise, with the module's scale in it; of an embedding [M, r].
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


def read_adapter(
    folder: Path, modules: Mapping[str, BaseModule], max_rank: int, *, bf16: bool = False
) -> LoraAdapter:
    """Reads an adapter's folder, on several threads.

    Args:
        modules: of the base, by the names that its checkpoint has.
        max_rank: the greatest rank that is served.
        bf16: factors are rounded to bf16, and are its bits.

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
    digest = hashlib.sha256(hashlib.sha256(raw).digest())
    with SafetensorsFile(folder / WEIGHTS_NAME) as file, ThreadPoolExecutor(THREADS, "adapter") as pool:
        hashed = pool.submit(lambda: digest.update(file.view().data))
        factors = _Reader(file, config, modules, max_rank, bf16=bf16).read(pool)
        hashed.result()
    rank = max(f.down.shape[0] for f in factors.values())
    return LoraAdapter(digest.digest(), rank, factors)


class _Reader:
    """One adapter's tensors and what is wanted of them."""

    def __init__(
        self,
        file: TensorFile,
        config: PeftConfig,
        modules: Mapping[str, BaseModule],
        max_rank: int,
        *,
        bf16: bool,
    ) -> None:
        self._file, self._config, self._max_rank, self._bf16 = file, config, max_rank, bf16
        self._modules = modules
        nested = any(name.startswith(PREFIX + TEXT_MODEL[0]) for name in file.tensors)
        self._spelled = {name: _spelled(name, nested=nested) for name in modules}  # as PEFT saw the base
        self._left = set(file.tensors)

    def read(self, pool: ThreadPoolExecutor) -> dict[str, Factors]:
        named = {n: m for n, m in self._modules.items() if self._config.adapts(self._spelled[n])}
        found = dict(zip(named, pool.map(self._factors, named, named.values()), strict=True))
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
        scales = (1.0, self._config.scale_of(spelled))
        down, up = (
            self._tensor(f"{PREFIX}{spelled}.{part}", shape, scale)
            for part, shape, scale in zip(names, shapes, scales, strict=True)
        )
        return Factors(down, up)

    def _tensor(self, name: str, shape: tuple[int, int], scale: float) -> Array:
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
        stored = self._file.part(name).bytes()
        if self._bf16 and info.format == "bf16":  # as the file has them, which is most of the time
            bits = np.array(stored).view("<u2").reshape(shape)
            finite = bool((bits & 0x7FFF).max(initial=0) < 0x7F80)
            values = (bits.astype(np.uint32) << 16).view(np.float32) if scale != 1 else None
        else:
            values = dequantize(info.format, stored, shape)
            finite = bool(np.isfinite(values).all())
        if not finite:
            raise ModelFileError(f"tensor {name} has values that are not finite", where=self._file.path)
        if values is None:
            return bits
        if scale != 1:
            values *= np.float32(scale)
        return _bf16_bits(values) if self._bf16 else values

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


def _bf16_bits(values: Array) -> Array:
    """Finite float32 values, which are overwritten, as bf16's bits: rounded to the nearest even."""
    bits = values.view(np.uint32)
    bits += (bits >> 16 & 1) + np.uint32(0x7FFF)
    bits >>= 16
    return bits.astype(np.uint16)


def _spelled(module: str, *, nested: bool) -> str:
    """The module's name with the prefix of the text model that an adapter has, of a nested one or not."""
    deep, flat = TEXT_MODEL
    rest = module.removeprefix(deep) if module.startswith(deep) else module.removeprefix(flat)
    if rest == module:  # the head is outside of the text model
        return module
    return (deep if nested else flat) + rest
