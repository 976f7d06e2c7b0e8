"""The llama line's face: from an open weights file to a model that the shared runner serves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.forward import forward, head
from pegainfer.models.llama.weights import TABLE, LlamaWeights, load_gguf, load_safetensors
from pegainfer.ops.weights import without_data
from pegainfer.runner.model import PagedModel
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.tensorfile import TensorFile


def from_gguf(file: GGUFFile) -> PagedModel:
    """Raises ConfigError, ModelFileError, UnsupportedError."""
    return model(load_gguf(file))


def from_hf(config: Mapping[str, Any], where: str, file: TensorFile) -> PagedModel:
    """`config`: the parsed config.json, which `where` names. Raises as `from_gguf`."""
    return model(load_safetensors(LlamaConfig.from_hf(config, where), file))


def from_config(config: Mapping[str, Any], where: str) -> PagedModel:
    """A model of this shape whose weights a device makes up. Raises ConfigError, UnsupportedError."""
    read = LlamaConfig.from_hf(config, where)
    return model(LlamaWeights(read, without_data(TABLE, read)))


def model(weights: LlamaWeights) -> PagedModel:
    c = weights.config
    return PagedModel(c, weights.tensors, weights.cos_sin, partial(forward, c), partial(head, c))
