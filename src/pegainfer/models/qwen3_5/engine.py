"""Entry points of the qwen3_5 line: from an open weights file to a model, composed of the runner's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pegainfer.models.qwen3_5.config import Qwen3_5Config, of_rank
from pegainfer.models.qwen3_5.forward import forward, groups, head
from pegainfer.models.qwen3_5.weights import TABLE, Qwen3_5Weights, load_gguf, load_safetensors
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.ops.weights import without_data
from pegainfer.runner.model import LineModel, decoder_model
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.tensorfile import TensorFile

if TYPE_CHECKING:
    from pegainfer.ops.adapters import AdaptedWeight


def from_gguf(file: GGUFFile, at: TensorRank = ONE_RANK) -> LineModel:
    """The part of a rank. Raises ConfigError, ModelFileError, OpError, UnsupportedError."""
    return model(load_gguf(file, at), at.ranks)


def from_hf(config: Mapping[str, Any], where: str, file: TensorFile, at: TensorRank = ONE_RANK) -> LineModel:
    """`config`: the parsed config.json, which `where` names. Raises as `from_gguf`."""
    return model(load_safetensors(Qwen3_5Config.from_hf(config, where), file, at), at.ranks)


def from_config(config: Mapping[str, Any], where: str, at: TensorRank = ONE_RANK) -> LineModel:
    """A model of this shape whose weights a device makes up. Raises ConfigError, UnsupportedError."""
    read = of_rank(Qwen3_5Config.from_hf(config, where), at)
    return model(Qwen3_5Weights(read, without_data(TABLE, read)), at.ranks)


def model(weights: Qwen3_5Weights, ranks: int = 1) -> LineModel:
    # `_adapted` gives the sizes of whole matrices only: several ranks serve no adapters.
    adapted = _adapted if ranks == 1 else None
    return decoder_model(weights, groups, forward, head, adapted=adapted, ranks=ranks)


def _adapted(config: Qwen3_5Config) -> tuple[AdaptedWeight, ...]:
    from pegainfer.ops.adapters import adapted_weights

    # Not routers, whose products are a part of `moe`, as those of experts are.
    found = tuple(w for w in adapted_weights(TABLE, config) if not w.name.endswith("_router"))
    if config.tiled_heads:  # rows of linear attention lie in another order than in the adapted checkpoint
        return tuple(w for w in found if ".linear_attn." not in w.module)
    return found
