"""LoRA adapters in a recorded program: which modules of a checkpoint they may name, and what is computed.

A line's forward does not mention adapters. Its program is rewritten. Ops whose matrices adapters may name are
replaced by those of `ops/lora_layers.py`. Where no such op exists, the op is lowered, and `lora_shrink` and
`lora_expand` follow each GEMM with such a matrix. `lora_lookup` and `lora_expand` follow the embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pegainfer.contract.errors import OpError
from pegainfer.ops.coarse import LM_HEAD
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.lora import LORA_EXPAND, LORA_LOOKUP, LORA_SHRINK
from pegainfer.ops.lora_layers import ADAPTED, weight_operands
from pegainfer.ops.program import Builder, OpCall, Program
from pegainfer.ops.tensor import Dim, Tensor
from pegainfer.ops.weights import LayeredConfig, WeightTable
from pegainfer.runtime.weights.adapter import BaseModule
from pegainfer.runtime.weights.weight import Shard

# Inputs that say which adapter each row has, -1 for none, by the step's size that they have.
INDICES: dict[Dim, str] = {"T": "adapters", "L": "logit_adapters"}


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of the forward and the factors that adapters may add to it.

    Args:
        module: of the checkpoint, as PEFT names it; `base` is its matrix.
        name: of the weight.
        rows: of the module's matrix, in the weight's order; None: all.
        shard: the part of the matrix that this tensor-parallel rank has; None: all.
    """

    module: str
    base: BaseModule
    name: str
    rows: Sequence[range] | None = None
    shard: Shard | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        whole = [self.base.rows, self.base.columns]
        if self.shard is not None:
            whole[self.shard.axis] //= self.shard.ranks
        return whole[0], whole[1]

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


def adapted_weights(
    table: WeightTable, config: LayeredConfig, shards: Mapping[str, Shard] | None = None
) -> tuple[AdaptedWeight, ...]:
    """Every matrix of such a model that the checkpoint has as a linear module or an embedding.

    Args:
        config: of one tensor-parallel rank.
        shards: that the rank has of its weights, by their names; of those that are not there it has all.
    """
    found: list[AdaptedWeight] = []
    for entry, layer in table.entries(config):
        sizes, stored = entry.sizes(config), entry.hf
        if len(sizes) != 2 or stored.convert is not None:
            continue
        whole = [getattr(config, field) for field in stored.shape] or list(sizes)
        name = entry.name.format(layer)
        if (shard := (shards or {}).get(name)) is not None:
            whole[shard.axis] *= shard.ranks
        base = BaseModule(whole[0], whole[1], embedding=entry is table.embed)
        rows = stored.rows(config) if stored.rows is not None else None
        found.append(AdaptedWeight(_module(stored.name.format(layer)), base, name, rows, shard))
    if config.tie_word_embeddings:
        height, width = table.embed.sizes(config)
        base = BaseModule(height, width)
        found.append(AdaptedWeight(_module(table.head.hf.name), base, table.embed.name))
    return tuple(found)


def adapted(
    program: Program, weights: Collection[AdaptedWeight], bounds: AdapterBounds, *, ranks: int = 1
) -> Program:
    """The program with what adapters add; as one of `ranks` ranks runs it.

    Its new inputs are those of `INDICES`, [T] and [L] int32; its new states are, for each weight by its key,
    `.down` [A, X, K] (of an embedding [A, V, X]), `.up` [A, X, N], and `.ranks` [A] int32.
    """
    return _Rewrite(program, weights, bounds).run(ranks)


class _Rewrite:
    def __init__(self, program: Program, weights: Collection[AdaptedWeight], bounds: AdapterBounds) -> None:
        self._program, self._bounds = program, bounds
        self._linear = {w.name: w for w in weights if not w.base.embedding}
        self._lookup = {w.name: w for w in weights if w.base.embedding}
        self._b = Builder(program.name)
        self._given: dict[str, Tensor] = {}  # inputs and states

    def run(self, ranks: int) -> Program:
        low = self._program.lowered(
            keep=lambda call: not self._touches(call) or self._has_form(call), ranks=ranks
        )
        for number, call in enumerate(low.calls):
            if self._has_form(call):
                self._b.calls.append(self._formed(call))
                continue
            self._b.calls.append(call)
            if call.spec is EMBEDDING:
                weight = self._lookup.get(call.tensors["table"].name)
            else:
                weight = self._linear.get(call.tensors["w"].name) if call.spec is LINEAR else None
            if weight is not None:
                self._add(weight, call, f"{number}.lora", call.tensors["out"])
        return self._b.build()

    def _touches(self, call: OpCall) -> bool:
        return any(t.name in self._linear for t in call.tensors.values())

    def _has_form(self, call: OpCall) -> bool:
        """Whether it becomes a layer with adapters: all its matrices may be named."""
        return call.spec.name in ADAPTED and all(w.name in self._linear for w in _matrices(call).values())

    def _formed(self, call: OpCall) -> OpCall:
        factors: dict[str, Tensor] = {}
        for operand, matrix in _matrices(call).items():
            weight = self._linear[matrix.name]
            rows, columns = matrix.shape
            down, up, ranks = self._states(weight, columns, rows)
            factors |= {f"down_{operand}": down, f"up_{operand}": up, f"ranks_{operand}": ranks}
        index = self._index(call)
        return OpCall.of(ADAPTED[call.spec.name], call.attrs, **call.tensors, adapters=index, **factors)

    def _index(self, call: OpCall) -> Tensor:
        rows = call.axes["T"]
        if rows not in INDICES:
            raise OpError(f"{call}: no adapter index for rows of size {rows}", expected=list(INDICES))
        return self._once("input", INDICES[rows], (rows,), "i32")

    def _states(self, weight: AdaptedWeight, inputs: Dim, outputs: Dim) -> tuple[Tensor, Tensor, Tensor]:
        count, rank, dtype = self._bounds.count, self._bounds.rank, self._bounds.dtype
        down = (count, inputs, rank) if weight.base.embedding else (count, rank, inputs)
        return (
            self._once("state", f"{weight.key}.down", down, dtype),
            self._once("state", f"{weight.key}.up", (count, rank, outputs), dtype),
            self._once("state", f"{weight.key}.ranks", (count,), "i32"),
        )

    def _add(self, weight: AdaptedWeight, call: OpCall, name: str, x: Tensor) -> None:
        index = self._index(call)
        h = self._b.buffer(name, call.axes["T"], self._bounds.rank)
        inputs = call.axes["V" if weight.base.embedding else "K"]
        down, up, ranks = self._states(weight, inputs, x.shape[1])
        if weight.base.embedding:
            ids = call.tensors["ids"]
            self._b.emit(LORA_LOOKUP, None, out=h, table=down, ids=ids, adapters=index, ranks=ranks)
        else:
            a = call.tensors["a"]
            self._b.emit(LORA_SHRINK, None, out=h, a=a, down=down, adapters=index, ranks=ranks)
        self._b.emit(LORA_EXPAND, None, x=x, h=h, up=up, adapters=index, ranks=ranks)

    def _once(self, kind: str, name: str, shape: tuple[Dim, ...], dtype: str) -> Tensor:
        if name not in self._given:
            make = self._b.input if kind == "input" else self._b.state
            self._given[name] = make(name, *shape, dtype=dtype)
        return self._given[name]


def _matrices(call: OpCall) -> dict[str, Tensor]:
    """The call's matrices by operand."""
    return {o.name: call.tensors[o.name] for o in weight_operands(call.spec) if o.name in call.tensors}


def whole_layers(program: Program, weights: Collection[AdaptedWeight]) -> bool:
    """Whether `adapted` leaves each layer of the program whole, so that a backend holds the same weights for
    the program with adapters as without. A GEMM of its own has its matrix alone either way.
    """
    linear = {w.name for w in weights if not w.base.embedding}
    return all(
        call.spec.name in ADAPTED or call.spec in (EMBEDDING, LM_HEAD, LINEAR)
        for call in program.calls
        if any(t.name in linear for t in call.tensors.values())
    )


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def base_modules(weights: Collection[AdaptedWeight]) -> Mapping[str, BaseModule]:
    """The modules that adapters may name."""
    return {w.module: w.base for w in weights}
