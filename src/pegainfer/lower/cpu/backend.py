"""A model's weights packed once, and programs made ready to run on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
import numpy as np

from pegainfer.contract.errors import ConfigError, OpError
from pegainfer.kernels.cpu.library import isa_name, kernels
from pegainfer.lower.cpu.encode import lowered
from pegainfer.lower.cpu.executor import CpuExecutor
from pegainfer.lower.cpu.packed import PackedWeight, packed_bytes, reserve
from pegainfer.lower.cpu.threads import ThreadPool
from pegainfer.ops.program import Program
from pegainfer.ops.spec import Role
from pegainfer.ops.tensor import Kind, Sizes, Tensor
from pegainfer.runtime.priority import at_usual_priority
from pegainfer.runtime.weights.weight import Weight

if TYPE_CHECKING:
    from pegainfer.runtime.rank_memory import RankMemory

Array = np.ndarray[Any, Any]
Activation = Literal["int8", "bf16", "f32"]
ACTIVATIONS = get_args(Activation)


class CpuOptions(msgspec.Struct, frozen=True):
    """How programs run on the CPU.

    Args:
        threads: with the calling one; 0: all cores that this process may use.
        isa: 'avx512', 'avx2', 'neon' or 'portable'; None: PEGAINFER_ISA, else the processor's best.
        activation: 'int8' rounds what meets a quantised weight to 8 bits, block by block (fast); 'f32' keeps
            it and expands the weight as GGUF defines it (exact). 'bf16' is 'int8' and rounds what meets a
            bf16 weight to bf16, where the processor multiplies that. Other weights meet float32.
        timing: keep nanoseconds for each call (`CpuExecutor.timings`).
    """

    threads: int = 0
    isa: str | None = None
    activation: Activation = "int8"
    timing: bool = False


class CpuBackend:
    """Implements ops.backend.Backend. Its executors share weights and threads, and run one at a time.

    Args:
        weights: every constant of the programs to come, by name. A weight is packed when a program first
            needs it, while its file is open.
        memory: of the group, where this is one of several ranks; closed with the backend.

    Raises ConfigError for options that this machine cannot serve, UnsupportedError without a built library.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        options: CpuOptions | None = None,
        memory: RankMemory | None = None,
    ) -> None:
        self.options = options or CpuOptions()
        if self.options.activation not in ACTIVATIONS:
            raise ConfigError(
                "activation dtype", expected=" or ".join(ACTIVATIONS), got=self.options.activation
            )
        self.isa = isa_name(self.options.isa)
        self._kernels = kernels(self.options.isa)
        self._weights = dict(weights)
        self._memory = memory
        self._packed: dict[str, PackedWeight] = {}
        self._plain: dict[str, Array] = {}
        self.pool = at_usual_priority(lambda: ThreadPool(self.options.threads))

    def prepare(self, program: Program, states: Mapping[str, Array], largest: Sizes) -> CpuExecutor:
        """Makes a program ready.

        Args:
            states: arrays by name, C-contiguous; the KV cache in the kernels' order (lower/cpu/kv.py).
            largest: the greatest value of each symbolic size that a buffer or output has.

        Raises UnsupportedError or OpError where the program does not fit these kernels or weights.
        """
        low = lowered(program, self._memory.ranks if self._memory else 1)
        matrices = {
            call.tensors[o.name].storage
            for call in low.calls
            for o in call.spec.operands
            if o.role is Role.WEIGHT and o.name in call.tensors
        }
        weights = low.tensors(Kind.WEIGHT)
        self._pack([t for t in weights if t in matrices and t.name not in self._packed])
        constants = {t: self._packed[t.name] if t in matrices else self._vector(t) for t in weights}
        return CpuExecutor(
            low, constants, states, largest,
            pool=self.pool, kernels=self._kernels,
            int8=self.options.activation != "f32", bf16=self.options.activation == "bf16",
            timing=self.options.timing, memory=self._memory,
        )  # fmt: skip

    def describe(self) -> str:
        """One line for `doctor` and logs."""
        # bf16 is beside bf16 weights alone: beside quantised ones it is int8 as well.
        activation = "int8/bf16" if self.options.activation == "bf16" else self.options.activation
        ranks = f"{self._memory.ranks} ranks of " if self._memory else ""
        return f"cpu ({self.isa}, {ranks}{self.pool.threads} threads, {activation} activations)"

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weights."""
        return sum(w.nbytes for w in self._packed.values())

    def close(self) -> None:
        """Ends the threads; executors must not run afterwards. Idempotent."""
        self.pool.close()
        self._weights.clear()
        if self._memory is not None:
            self._memory.close()

    def _pack(self, tensors: list[Tensor]) -> None:
        """Packs matrices side by side, in the order in which they are given."""
        sizes = [packed_bytes(t.dtype, t.sizes({})) for t in tensors]
        memory, at = reserve(sum(sizes)), 0
        for t, nbytes in zip(tensors, sizes, strict=True):
            part = memory[at : at + nbytes]
            self._packed[t.name] = PackedWeight(self._weight(t), part, self.pool.threads)
            at += nbytes

    def _vector(self, t: Tensor) -> Array:
        if t.name not in self._plain:
            self._plain[t.name] = self._weight(t).values()
        return self._plain[t.name]

    def _weight(self, t: Tensor) -> Weight:
        weight = self._weights.pop(t.name, None)
        if weight is None:
            raise OpError(f"no weight for {t}")
        if (weight.dtype, weight.shape) != (t.dtype, t.shape):
            raise OpError(
                "a weight differs from its declaration", expected=str(t), got=f"{weight.dtype} {weight.shape}"
            )
        return weight
