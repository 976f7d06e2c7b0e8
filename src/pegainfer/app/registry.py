"""Which model line serves an architecture: the one table of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from pegainfer.contract.errors import UnsupportedError
from pegainfer.contract.step import Runner, RunnerInfo, StepPolicy
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.ops.backend import Backend
from pegainfer.ops.kv_scales import Scales
from pegainfer.ops.program import Program
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.runner.program import Formats
from pegainfer.runtime.weights.gguf import GGUF
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Weight

if TYPE_CHECKING:
    from pegainfer.runner.cuda import CudaRunner
    from pegainfer.runner.parts import CudaBackend

# The `architectures` name of config.json, or `general.architecture` of GGUF -> the line's module.
LINES: dict[str, str] = {
    "LlamaForCausalLM": "pegainfer.models.llama.engine",
    "llama": "pegainfer.models.llama.engine",
    "Qwen3ForCausalLM": "pegainfer.models.qwen3.engine",
    "qwen3": "pegainfer.models.qwen3.engine",
    "Qwen3MoeForCausalLM": "pegainfer.models.qwen3_moe.engine",
    "qwen3moe": "pegainfer.models.qwen3_moe.engine",
    "Qwen3_5ForConditionalGeneration": "pegainfer.models.qwen3_5.engine",
    "Qwen3_5ForCausalLM": "pegainfer.models.qwen3_5.engine",
    "qwen35": "pegainfer.models.qwen3_5.engine",
    "Qwen3_5MoeForConditionalGeneration": "pegainfer.models.qwen3_5.engine",
    "Qwen3_5MoeForCausalLM": "pegainfer.models.qwen3_5.engine",
    "qwen35moe": "pegainfer.models.qwen3_5.engine",
    "deepseek2": "pegainfer.models.deepseek_v2.engine",
    "DeepseekV2ForCausalLM": "pegainfer.models.deepseek_v2.engine",
    "DeepseekV3ForCausalLM": "pegainfer.models.deepseek_v2.engine",
    "KimiK25ForConditionalGeneration": "pegainfer.models.deepseek_v2.engine",
    "Kimi_K25ForConditionalGeneration": "pegainfer.models.deepseek_v2.engine",
}
# What Hugging Face calls GGUF's architectures.
HF_NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen35": "Qwen3_5ForConditionalGeneration",
    "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
    "deepseek2": "DeepseekV3ForCausalLM",
}


class Model(Protocol):
    """A model whose weights are mapped but not yet packed; runner/model.py documents each member."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def weights(self) -> Mapping[str, Weight]: ...

    @property
    def groups(self) -> Callable[[int, Formats], tuple[GroupLayout, ...]]: ...

    @property
    def gpu_prefill_tokens(self) -> int: ...

    @property
    def make_policy(self) -> Callable[[RunnerInfo, Any], StepPolicy] | None: ...

    def bounded(self, vocab_size: int) -> Model: ...
    def quantized(self, kind: str) -> Model: ...
    def expanded(self) -> Model: ...
    def scaled(self, kv_scales: Scales) -> Model: ...

    def tensors(self, num_positions: int) -> dict[str, Weight]: ...

    def weight_bytes(self, num_positions: int, *, fp8: bool = False) -> int: ...
    def adapter_bytes(self, info: RunnerInfo) -> int: ...

    def programs(
        self, info: RunnerInfo, groups: tuple[GroupLayout, ...], steps: Formats, max_logprobs: int
    ) -> dict[str, Program]: ...

    def plain_forward(
        self, info: RunnerInfo, groups: tuple[GroupLayout, ...], steps: Formats
    ) -> Program | None: ...

    def build(
        self,
        info: RunnerInfo,
        groups: tuple[GroupLayout, ...],
        backend: Backend,
        *,
        steps: Formats,
        max_logprobs: int,
    ) -> Runner: ...

    def build_cuda(
        self,
        info: RunnerInfo,
        groups: tuple[GroupLayout, ...],
        backend: CudaBackend,
        *,
        steps: Formats,
        max_logprobs: int,
    ) -> CudaRunner: ...


class ModelLine(Protocol):
    """The module that a line registers."""

    def from_gguf(self, file: GGUF, at: TensorRank = ONE_RANK) -> Model: ...

    def from_hf(
        self, config: Mapping[str, Any], where: str, file: TensorFile, at: TensorRank = ONE_RANK
    ) -> Model: ...

    def from_config(self, config: Mapping[str, Any], where: str, at: TensorRank = ONE_RANK) -> Model: ...


def find_line(architecture: object, where: str) -> ModelLine:
    """Imports the line of an architecture. Raises UnsupportedError."""
    if not isinstance(architecture, str) or architecture not in LINES:
        raise UnsupportedError(
            "no model line for this architecture",
            expected=" ".join(LINES),
            got=f"{architecture!r:.80}",
            where=where,
        )
    line: Any = importlib.import_module(LINES[architecture])
    return cast(ModelLine, line)
