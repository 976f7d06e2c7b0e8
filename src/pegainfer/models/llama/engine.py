"""Entry points of the llama line: from an open weights file to a model, composed of the runner's parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.forward import forward, groups, head
from pegainfer.models.llama.weights import TABLE, LlamaWeights, load_gguf, load_safetensors
from pegainfer.ops.ranks import ONE_RANK, TensorRank, config_of_rank
from pegainfer.ops.weights import without_data
from pegainfer.runner.model import LineModel, decoder_model
from pegainfer.runtime.weights.gguf import GGUF
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Weight

if TYPE_CHECKING:
    from pegainfer.ops.adapters import AdaptedWeight


def from_gguf(file: GGUF, at: TensorRank = ONE_RANK) -> LineModel:
    """The part of a rank. Raises ConfigError, ModelFileError, OpError, UnsupportedError."""
    return model(load_gguf(file, at), at.ranks)


def from_hf(config: Mapping[str, Any], where: str, file: TensorFile, at: TensorRank = ONE_RANK) -> LineModel:
    """`config`: the parsed config.json, which `where` names. Raises as `from_gguf`."""
    return model(load_safetensors(LlamaConfig.from_hf(config, where), file, at), at.ranks)


def from_config(config: Mapping[str, Any], where: str, at: TensorRank = ONE_RANK) -> LineModel:
    """A model of this shape whose weights a device makes up. Raises ConfigError, UnsupportedError."""
    read = config_of_rank(LlamaConfig.from_hf(config, where), at)
    return model(LlamaWeights(read, without_data(TABLE, read)), at.ranks)


def model(weights: LlamaWeights, ranks: int = 1) -> LineModel:
    adapted = partial(_adapted, weights.tensors)
    return decoder_model(weights, groups, forward, head, adapted=adapted, ranks=ranks)


def _adapted(tensors: Mapping[str, Weight], config: LlamaConfig) -> tuple[AdaptedWeight, ...]:
    from pegainfer.ops.adapters import adapted_weights

    shards = {name: w.shard for name, w in tensors.items() if w.shard is not None}
    return adapted_weights(TABLE, config, shards)
