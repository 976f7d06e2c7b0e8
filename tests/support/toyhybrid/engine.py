"""Entry points of the toy hybrid line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegainfer.contract.errors import UnsupportedError
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.ops.weights import without_data
from pegainfer.runner.model import LineModel, decoder_model
from pegainfer.runtime.weights.gguf import GGUF
from pegainfer.runtime.weights.tensorfile import TensorFile
from tests.support.toyhybrid.config import ToyConfig
from tests.support.toyhybrid.forward import forward, groups, head
from tests.support.toyhybrid.weights import TABLE, ToyWeights, load_safetensors


def from_gguf(file: GGUF, at: TensorRank = ONE_RANK) -> LineModel:
    raise UnsupportedError("the toy line has no GGUF form", where=file.path)


def from_hf(config: Mapping[str, Any], where: str, file: TensorFile, at: TensorRank = ONE_RANK) -> LineModel:
    """`config`: the parsed config.json, which `where` names. Raises ConfigError, ModelFileError."""
    assert at == ONE_RANK, "its weights are not divided"
    return model(load_safetensors(ToyConfig.from_hf(config, where), file))


def from_config(config: Mapping[str, Any], where: str) -> LineModel:
    """A model of this shape whose weights a device makes up. Raises ConfigError."""
    read = ToyConfig.from_hf(config, where)
    return model(ToyWeights(read, without_data(TABLE, read)))


def model(weights: ToyWeights) -> LineModel:
    return decoder_model(weights, groups, forward, head)
