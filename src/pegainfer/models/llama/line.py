"""The llama line's face: from an open weights file to a Runner on some backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.contract.step import KVSpec, PageGroup, RunnerInfo
from pegainfer.kv.device.pool import KVPool
from pegainfer.kv.device.slots import Slots
from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.engine import LlamaRunner, Programs
from pegainfer.models.llama.forward import Sizes, forward, prompt_logprobs
from pegainfer.models.llama.weights import LlamaWeights, load_gguf, load_safetensors
from pegainfer.ops.backend import Backend
from pegainfer.ops.program import Program
from pegainfer.ops.sampler import sampler
from pegainfer.ops.tensor import FORMATS
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.raw import RawWeight
from pegainfer.runtime.weights.tensorfile import TensorFile

KV_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}


class LlamaModel:
    """A model whose weights are mapped but not yet packed."""

    def __init__(self, weights: LlamaWeights) -> None:
        self._weights = weights
        self.config = weights.config

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> LlamaModel:
        """Raises ConfigError, ModelFileError, UnsupportedError."""
        return cls(load_gguf(file))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str, file: TensorFile) -> LlamaModel:
        """`config`: the parsed config.json, which `where` names. Raises as `from_gguf`."""
        return cls(load_safetensors(LlamaConfig.from_hf(config, where), file))

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.config.max_position_embeddings

    @property
    def formats(self) -> dict[str, str]:
        """Storage format of each weight by name."""
        return self._weights.formats

    def kv_spec(self, block_size: int, kv_dtype: str) -> KVSpec:
        """One group of pages. All layers of a block lie together, so that a block is one copy."""
        values = self.config.num_layers * 2 * self.config.kv_size * block_size
        bytes_per_block = values * FORMATS[kv_dtype][1]
        return KVSpec((PageGroup(name="kv", block_size=block_size, bytes_per_block=bytes_per_block),))

    def tensors(self, num_positions: int) -> dict[str, RawWeight]:
        """Every constant of the programs by name; `num_positions` is the served length."""
        return {**self._weights.tensors, "cos_sin": self._weights.cos_sin(num_positions)}

    def programs(self, info: RunnerInfo, kv_dtype: str, max_logprobs: int) -> dict[str, Program]:
        """What a step runs, by the fields of models/llama/engine.py's Programs."""
        group = info.kv.groups[0]
        assert isinstance(group, PageGroup)
        sizes = Sizes(
            num_blocks=info.num_blocks[0],
            block_size=group.block_size,
            blocks_per_seq=-(-info.max_model_len // group.block_size),
            num_positions=info.max_model_len,
            kv_dtype=kv_dtype,
        )
        return {
            "forward": forward(self.config, self.formats, sizes),
            "sampler": sampler(info.vocab_size, info.max_slots, info.max_model_len + 1, max_logprobs),
            "prompt_logprobs": prompt_logprobs(self.config, self.formats, max_logprobs),
        }

    def build(self, info: RunnerInfo, backend: Backend, *, kv_dtype: str, max_logprobs: int) -> LlamaRunner:
        """A runner on `backend`, which holds `tensors(info.max_model_len)` and is closed with the runner.

        Args:
            info: its KV is that of `kv_spec`.
            kv_dtype: a key of KV_DTYPES.
        """
        max_logprobs = min(max_logprobs, info.vocab_size)
        slots = Slots(info, max_logprobs)
        group, c = info.kv.groups[0], self.config
        assert isinstance(group, PageGroup)
        block_shape = (c.num_layers, 2, c.num_kv_heads, group.block_size, c.head_dim)
        pool = KVPool(info.num_blocks[0], block_shape, KV_DTYPES[kv_dtype])
        states = {"kv": pool.array, "history": slots.history}
        largest = {"T": info.max_tokens, "R": info.max_slots, "L": info.max_slots}
        ready = {
            name: backend.prepare(program, states, largest)
            for name, program in self.programs(info, kv_dtype, max_logprobs).items()
        }
        return LlamaRunner(info, slots, pool, Programs(**ready), backend)
