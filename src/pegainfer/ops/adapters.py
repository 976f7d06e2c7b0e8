"""LoRA adapters in a recorded program: which modules of a checkpoint they may name, and what is computed.

A forward says nothing of adapters. Its program is rewritten: `lora_shrink` and `lora_expand` follow each GEMM
with a matrix that adapters may name, `lora_lookup` and `lora_expand` the embedding. Coarse ops around such a
GEMM are lowered first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pegainfer.contract.errors import OpError
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.lora import LORA_EXPAND, LORA_LOOKUP, LORA_SHRINK
from pegainfer.ops.program import Builder, OpCall, Program
from pegainfer.ops.tensor import Dim, Tensor
from pegainfer.ops.weights import LayeredConfig, WeightTable
from pegainfer.runtime.weights.adapter import BaseModule

# Inputs that say which adapter each row has, -1 for none, by the step's size that they have.
INDICES: dict[Dim, str] = {"T": "adapters", "L": "logit_adapters"}


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of the forward and the factors that adapters may add to it.

    Args:
        module: of the checkpoint, as PEFT names it; `base` is its matrix.
        name: of the weight.
        rows: of the module's matrix, in the weight's order; None: all.
    """

    module: str
    base: BaseModule
    name: str
    rows: Sequence[range] | None = None

    @property
    def key(self) -> str:
        """What the names of the factors' states begin with. A tied matrix has factors for each use."""
        return f"lora.{self.name}.{'lookup' if self.base.embedding else 'linear'}"


@dataclass(frozen=True)
class AdapterBounds:
    """Adapters that a program holds at once, their greatest rank and the storage format of factors."""

    count: int
    rank: int
    dtype: str


def adapted_weights(table: WeightTable, config: LayeredConfig) -> tuple[AdaptedWeight, ...]:
    """Every matrix of such a model that the checkpoint has as a linear module or an embedding."""
    found: list[AdaptedWeight] = []
    for entry, layer in table.entries(config):
        sizes, stored = entry.sizes(config), entry.hf
        if len(sizes) != 2 or stored.convert is not None:
            continue
        height, width = [getattr(config, field) for field in stored.shape] or sizes
        base = BaseModule(height, width, embedding=entry is table.embed)
        rows = stored.rows(config) if stored.rows is not None else None
        found.append(AdaptedWeight(_module(stored.name.format(layer)), base, entry.name.format(layer), rows))
    if config.tie_word_embeddings:
        height, width = table.embed.sizes(config)
        base = BaseModule(height, width)
        found.append(AdaptedWeight(_module(table.head.hf.name), base, table.embed.name))
    return tuple(found)


def adapted(program: Program, weights: Collection[AdaptedWeight], bounds: AdapterBounds) -> Program:
    """The program with what adapters add; as one rank runs it.

    Its new inputs are those of `INDICES`, [T] and [L] int32; its new states are, for each weight by its key,
    `.down` [A, X, K] (of an embedding [A, V, X]), `.up` [A, X, N], and `.ranks` [A] int32.
    """
    return _Rewrite(program, weights, bounds).run()


class _Rewrite:
    def __init__(self, program: Program, weights: Collection[AdaptedWeight], bounds: AdapterBounds) -> None:
        self._program, self._bounds = program, bounds
        self._linear = {w.name: w for w in weights if not w.base.embedding}
        self._lookup = {w.name: w for w in weights if w.base.embedding}
        self._b = Builder(program.name)
        self._given: dict[str, Tensor] = {}  # inputs and states

    def run(self) -> Program:
        low = self._program.lowered(keep=lambda call: not self._touches(call))
        for number, call in enumerate(low.calls):
            self._b.calls.append(call)
            if call.spec is EMBEDDING and (w := self._lookup.get(call.tensors["table"].name)):
                self._add(w, call, f"{number}.lora", call.tensors["out"])
            elif call.spec in (LINEAR, LINEAR_RESIDUAL) and (w := self._linear.get(call.tensors["w"].name)):
                self._add(w, call, f"{number}.lora", call.tensors["out" if call.spec is LINEAR else "x"])
        return self._b.build()

    def _touches(self, call: OpCall) -> bool:
        return any(t.name in self._linear for t in call.tensors.values())

    def _add(self, weight: AdaptedWeight, call: OpCall, name: str, x: Tensor) -> None:
        rows = call.axes["T"]
        if rows not in INDICES:
            raise OpError(f"{call}: no adapter index for rows of size {rows}", expected=list(INDICES))
        index = self._once("input", INDICES[rows], (rows,), "i32")
        count, rank = self._bounds.count, self._bounds.rank
        ranks = self._once("state", f"{weight.key}.ranks", (count,), "i32")
        h = self._b.buffer(name, rows, rank)
        if weight.base.embedding:
            shape: tuple[Dim, ...] = (count, call.axes["V"], rank)
            down = self._once("state", f"{weight.key}.down", shape, self._bounds.dtype)
            self._b.emit(LORA_LOOKUP, None, out=h, table=down, ids=call.tensors["ids"], adapters=index,
                         ranks=ranks)  # fmt: skip
        else:
            shape = (count, rank, call.axes["K"])
            down = self._once("state", f"{weight.key}.down", shape, self._bounds.dtype)
            self._b.emit(LORA_SHRINK, None, out=h, a=call.tensors["a"], down=down, adapters=index,
                         ranks=ranks)  # fmt: skip
        width = x.shape[1]
        up = self._once("state", f"{weight.key}.up", (count, rank, width), self._bounds.dtype)
        self._b.emit(LORA_EXPAND, None, x=x, h=h, up=up, adapters=index, ranks=ranks)

    def _once(self, kind: str, name: str, shape: tuple[Dim, ...], dtype: str) -> Tensor:
        if name not in self._given:
            make = self._b.input if kind == "input" else self._b.state
            self._given[name] = make(name, *shape, dtype=dtype)
        return self._given[name]


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def base_modules(weights: Collection[AdaptedWeight]) -> Mapping[str, BaseModule]:
    """The modules that adapters may name."""
    return {w.module: w.base for w in weights}
