"""Entry points of the deepseek_v2 line: from an open weights file to a model, made of the runner's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegainfer.models.deepseek_v2.config import DeepseekV2Config, of_rank
from pegainfer.models.deepseek_v2.forward import forward, groups, head
from pegainfer.models.deepseek_v2.weights import TABLE, DeepseekV2Weights, load_gguf, load_safetensors
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.ops.weights import without_data
from pegainfer.runner.model import LineModel, decoder_model
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.tensorfile import TensorFile


def from_gguf(file: GGUFFile, at: TensorRank = ONE_RANK) -> LineModel:
    """The part of a rank. Raises ConfigError, ModelFileError, OpError, UnsupportedError."""
    return model(load_gguf(file, at), at.ranks)


def from_hf(config: Mapping[str, Any], where: str, file: TensorFile, at: TensorRank = ONE_RANK) -> LineModel:
    """`config`: the parsed config.json, which `where` names. Raises as `from_gguf`."""
    return model(load_safetensors(DeepseekV2Config.from_hf(config, where), file, at), at.ranks)


def from_config(config: Mapping[str, Any], where: str, at: TensorRank = ONE_RANK) -> LineModel:
    """A model of this shape whose weights a device makes up. Raises ConfigError, UnsupportedError."""
    read = of_rank(DeepseekV2Config.from_hf(config, where), at)
    return model(DeepseekV2Weights(read, without_data(TABLE, read)), at.ranks)


# Each step expands the latents of a row's whole prefix. V2-Lite's prompt of 16,000 tokens takes 203 ms on an
# H200 in steps of 8,192, and 190 in one.
GPU_PREFILL_TOKENS = 16_384


def model(weights: DeepseekV2Weights, ranks: int = 1) -> LineModel:
    return decoder_model(weights, groups, forward, head, ranks=ranks, gpu_prefill_tokens=GPU_PREFILL_TOKENS)
