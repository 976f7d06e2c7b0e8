"""A model as the assembly sees it: the parts that a line's engine.py puts together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from pegainfer.contract.errors import UnsupportedError
from pegainfer.contract.step import Runner, RunnerInfo, StepPolicy
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.ops.backend import Backend
from pegainfer.ops.expert_counts import choices_of, counting
from pegainfer.ops.float8 import E4M3
from pegainfer.ops.kv_scales import Scales, with_kv_scales
from pegainfer.ops.program import Program
from pegainfer.ops.sampler import Head, hidden_states, prompt_logprobs, sampler
from pegainfer.runner.host import HostRunner
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.packed import OF_FORMAT
from pegainfer.runtime.weights.weight import Weight

if TYPE_CHECKING:
    from pegainfer.ops.adapters import AdaptedWeight
    from pegainfer.runner.cuda import CudaRunner
    from pegainfer.runner.parts import CudaBackend

C = TypeVar("C", bound="ServedConfig")
C_co = TypeVar("C_co", bound="ServedConfig", covariant=True)

Formatted = Mapping[str, str]  # storage format of each weight by name


class LineModel(msgspec.Struct, frozen=True):
    """A model whose weights are mapped but not yet packed. Serves app/registry.py's Model.

    It is a record without hooks. A line that needs another runner, other programs around its forward or
    weights of another kind has a class of its own with the members of Model, made from the same parts.

    Args:
        vocab_size: ids that may be read and drawn: at most the rows of the head.
        max_position_embeddings: tokens that can be served.
        weights: every weight by the forward's name.
        adapted: lists the weights that LoRA adapters may add to; none: the line serves no adapters.
        tables: makes each constant that depends on the served length, by name, from the number of positions.
        groups: makes the line's KV groups from the tokens of a page block and the formats of a step.
        forward: records the line's forward pass.
        head: the forward's end, for a residual stream in the given format.
        make_policy: makes the line's own scheduling policy from the runner's bounds and the scheduler's
            options (engine/config.py); None: the default scheduler.
        kv_scales: what an 8-bit KV cache divides keys and values by.
        ranks: tensor-parallel ranks; weights, groups and forward are those of one of them.
        gpu_prefill_tokens: prompt tokens of a step on a GPU, as measured for the line; 0: the default.
        expands: whether quantised matrices become bf16 on a GPU, also where it has a packed form for them.
    """

    vocab_size: int
    max_position_embeddings: int
    weights: Mapping[str, Weight]
    groups: Callable[[int, Formats], tuple[GroupLayout, ...]]
    forward: Callable[[Formatted, Sizes, Formats], Program]
    head: Callable[[Formatted, str], Head]
    tables: Mapping[str, Callable[[int], Weight]] = msgspec.field(default_factory=dict)
    make_policy: Callable[[RunnerInfo, Any], StepPolicy] | None = None
    adapted: Callable[[], tuple[AdaptedWeight, ...]] = tuple
    kv_scales: Scales = msgspec.field(default_factory=dict)
    ranks: int = 1
    gpu_prefill_tokens: int = 0
    expands: bool = False

    def bounded(self, vocab_size: int) -> LineModel:
        """The same model where only ids below `vocab_size` name tokens; the head's other rows are padding."""
        return replace(self, vocab_size=min(self.vocab_size, vocab_size))

    def quantized(self, kind: str) -> LineModel:
        """The same model, whose plain matrices are quantised while a backend loads them.

        kind: a key of ops.quantize_on_load.KINDS.
        """
        from pegainfer.ops.quantize_on_load import quantized_on_load

        return replace(self, weights=quantized_on_load(self.weights, kind))

    def scaled(self, kv_scales: Scales) -> LineModel:
        """The same model with these scales for an 8-bit KV cache; other caches need none."""
        return replace(self, kv_scales=kv_scales)

    def expanded(self) -> LineModel:
        """The same model, of which a GPU holds no matrix in a packed form."""
        return replace(self, expands=True)

    def weight_bytes(self, num_positions: int, *, fp8: bool = False) -> int:
        """Bytes of all constants on a GPU, which holds quantised matrices in packed forms where there is one,
        other matrices as bf16, vectors and tables as float32.

        fp8: whether it keeps FP8 matrices in 8 bits.
        """
        many = (w for w in self.weights.values() if len(w.shape) > 1)
        matrices = sum(_matrix_bytes(w, fp8=fp8, packed=not self.expands) for w in many)
        vectors = sum(prod(w.shape) for w in self.weights.values() if len(w.shape) == 1)
        row = sum(prod(make(1).shape) for make in self.tables.values())
        return matrices + 4 * (vectors + num_positions * row)

    def tensors(self, num_positions: int) -> dict[str, Weight]:
        """Every constant of the programs by name; `num_positions` is the served length."""
        return {**self.weights, **{name: make(num_positions) for name, make in self.tables.items()}}

    def adapter_bytes(self, info: RunnerInfo) -> int:
        """Bytes of all adapter slots on a GPU, which holds factors as bf16."""
        if not info.max_adapters:
            return 0
        adapted = self.adapted()
        widths = sum(sum(w.sizes) for w in adapted)
        return info.max_adapters * (2 * info.max_adapter_rank * widths + 4 * len(adapted))

    def programs(
        self, info: RunnerInfo, groups: tuple[GroupLayout, ...], steps: Formats, max_logprobs: int
    ) -> dict[str, Program]:
        """What a step runs, by the fields of runner/host.py's Programs.

        Args:
            groups: as `groups` made them; `info` has their KVSpec.
            steps: storage formats of what a step computes and keeps.

        Raises UnsupportedError where adapters are asked for and the line serves none, ConfigError where
        experts are to be counted and there are none.
        """
        formats = self._formats()
        head = self.head(formats, steps.residual)
        forward = self._plain_forward(info, groups, steps, formats)
        scores = prompt_logprobs(head, info.vocab_size, max_logprobs)
        if info.max_adapters:
            from pegainfer.ops.adapters import AdapterBounds, adapted

            weights = self.adapted()
            if not weights:
                where = " on several ranks" if self.ranks > 1 else ""
                raise UnsupportedError(
                    f"this model line serves no LoRA adapters{where}", remedy="leave out --enable-lora"
                )
            bounds = AdapterBounds(info.max_adapters, info.max_adapter_rank, steps.activation)
            forward = adapted(forward, weights, bounds, ranks=self.ranks)
            scores = adapted(scores, weights, bounds)
        return {
            "forward": forward,
            "sampler": sampler(
                head.vocab_size, info.vocab_size, info.max_slots, info.max_model_len + 1, max_logprobs
            ),
            "prompt_logprobs": scores,
            "hidden_states": hidden_states(head),
        }

    def plain_forward(
        self, info: RunnerInfo, groups: tuple[GroupLayout, ...], steps: Formats
    ) -> Program | None:
        """The forward pass without adapters, for steps of a GPU in which no row has one.

        None where `programs` has it already, and where the two programs need weights in different layouts.
        """
        if not info.max_adapters:
            return None
        from pegainfer.ops.adapters import whole_layers

        forward = self._plain_forward(info, groups, steps, self._formats())
        return forward if whole_layers(forward, self.adapted()) else None

    def _formats(self) -> Formatted:
        return {
            name: "bf16" if self.expands and w.dtype in OF_FORMAT else w.dtype
            for name, w in self.weights.items()
        }

    def _plain_forward(
        self, info: RunnerInfo, groups: tuple[GroupLayout, ...], steps: Formats, formats: Formatted
    ) -> Program:
        forward = self.forward(formats, Sizes.of(info, groups), steps)
        forward = forward if self.ranks > 1 else forward.on_one_rank()
        if self.kv_scales and steps.kv == E4M3:
            forward = with_kv_scales(forward, self.kv_scales)
        return counting(forward) if info.counts_experts else forward

    def build(
        self,
        info: RunnerInfo,
        groups: tuple[GroupLayout, ...],
        backend: Backend,
        *,
        steps: Formats,
        max_logprobs: int,
    ) -> Runner:
        """A runner on `backend`, which holds `tensors(info.max_model_len)` and is closed with the runner.

        Raises ConfigError where memory for the KV cache cannot be had.
        """
        max_logprobs = min(max_logprobs, info.vocab_size)
        programs = self.programs(info, groups, steps, max_logprobs)
        adapters = None
        if info.max_adapters:
            from pegainfer.runner.adapters import HostAdapters

            adapters = HostAdapters(programs["forward"], self.adapted(), info)
        return HostRunner.build(programs, info, groups, backend, max_logprobs=max_logprobs, adapters=adapters)

    def build_cuda(
        self,
        info: RunnerInfo,
        groups: tuple[GroupLayout, ...],
        backend: CudaBackend,
        *,
        steps: Formats,
        max_logprobs: int,
    ) -> CudaRunner:
        """A runner on a GPU. Takes all memory that steps need; then load the weights and start the runner.

        Raises CudaError where memory is short, UnsupportedError where no kernel serves an op.
        """
        from pegainfer.runner.cuda import CudaRunner
        from pegainfer.runner.cuda_adapters import CudaAdapters
        from pegainfer.runner.cuda_expert_counts import CudaExpertCounts
        from pegainfer.runner.parts import make_parts

        programs = self.programs(info, groups, steps, max_logprobs)
        adapters = None
        if info.max_adapters:
            adapters = CudaAdapters(programs["forward"], self.adapted(), info, backend.ctx.device)
        states = {} if adapters is None else adapters.states
        plain = self.plain_forward(info, groups, steps)
        parts = make_parts(programs, info, groups, backend, states, plain)
        experts = None
        if info.counts_experts:
            experts = CudaExpertCounts(choices_of(programs["forward"]), parts, backend.ctx.library.kernel)
        return CudaRunner(info, parts, max_logprobs, adapters, experts)


def _matrix_bytes(w: Weight, *, fp8: bool, packed: bool) -> int:
    if fp8 and len(w.shape) == 2 and w.dtype in ("fp8_r128", "fp8_g128"):
        return prod(w.shape) + prod(w.shape) // 32  # a scale takes 4 bytes for 128 columns at the most
    form = OF_FORMAT.get(w.dtype) if packed and len(w.shape) == 2 else None
    return 2 * prod(w.shape) if form is None else form.nbytes(w.shape[0], w.shape[1])


class ServedConfig(Protocol):
    """What a model's record takes from a line's config."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


class LineWeights(Protocol[C_co]):
    """A line's weights beside its config."""

    @property
    def config(self) -> C_co: ...

    @property
    def tensors(self) -> Mapping[str, Weight]: ...

    def cos_sin(self, num_positions: int) -> Weight: ...


def decoder_model(
    weights: LineWeights[C],
    groups: Callable[[C, int, Formats], tuple[GroupLayout, ...]],
    forward: Callable[[C, Formatted, Sizes, Formats], Program],
    head: Callable[[C, Formatted, str], Head],
    *,
    adapted: Callable[[C], tuple[AdaptedWeight, ...]] | None = None,
    ranks: int = 1,
    gpu_prefill_tokens: int = 0,
) -> LineModel:
    """The record of a model whose only table is that of its rotation, from a line's functions of a config."""
    config = weights.config
    return LineModel(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        weights=weights.tensors,
        tables={"cos_sin": weights.cos_sin},
        groups=partial(groups, config),
        forward=partial(forward, config),
        head=partial(head, config),
        adapted=tuple if adapted is None else partial(adapted, config),
        ranks=ranks,
        gpu_prefill_tokens=gpu_prefill_tokens,
    )
