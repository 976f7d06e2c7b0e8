"""Checks a call that runs at its full size on the device: some of its rows and columns are compared with the
reference. Rows and columns do not depend on each other, and a float64 reference of all of them would take too
long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.ops.cases.common import i32
from pegainfer.ops.check import Deviation, Report, compare_output
from pegainfer.ops.compose import run_reference
from pegainfer.ops.program import OpCall
from pegainfer.ops.rounding import WRITTEN, run_rounding, share_of_rounding
from pegainfer.ops.spec import Arrays, Case, Role, block_table
from pegainfer.ops.tensor import Sizes
from pegainfer.runtime.cuda.tensor import DeviceTensor, item_bytes

Array = np.ndarray[Any, Any]
ROWS = 4  # that are compared


@dataclass(frozen=True)
class _Places:
    """Which part of a call is compared.

    Args:
        letter: T or L: the axis of `rows`.
        rows: [k], in order.
        tokens: [k], where operands have an axis T.
        blocks: of the KV pool, in the order in which the compared call has them.
        numbers: those blocks by their number in the pool.
    """

    letter: str
    rows: Array
    tokens: Array
    blocks: Array
    numbers: dict[int, int]


class SamplingCheck:
    """Compares a sample of a call's outputs with the reference. It reads the call's operands before and after
    the call.

    Args:
        weights: the call's own, float32 by operand.
        columns: by axis letter, which rows of the weights those are; all where it is missing.
    """

    def __init__(
        self,
        executor: CudaExecutor,
        ctx: CudaContext,
        call: OpCall,
        env: Sizes,
        weights: Mapping[str, Array],
        columns: Mapping[str, Array],
    ) -> None:
        self._executor, self._ctx, self._call, self._env = executor, ctx, call, env
        self._weights, self._columns = weights, columns
        self._places = self._choose()
        self._before = self._read(tuple(call.tensors))

    def check(self, label: str, run: Callable[[], None]) -> Report:
        """Runs the call and compares. 16-bit results may err as their rounding does, others by tolerance."""
        run()
        spec, attrs, sizes = self._call.spec, self._attrs(), self._sizes()
        after = self._read([o.name for o in spec.operands if o.role in WRITTEN and o.name in self._before])
        exact = {name: a.copy() for name, a in self._before.items()}
        run_reference(spec, sizes, exact, attrs)
        sixteen = next((t.dtype for t in self._call.tensors.values() if t.dtype in ("bf16", "f16")), None)
        stepwise = {name: a.copy() for name, a in self._before.items()} if sixteen else exact
        if sixteen:
            run_rounding(spec, sizes, stepwise, attrs, sixteen)
        tolerance = spec.tolerance["f32"]
        case = Case(label, sizes, attrs, self._before)
        bounds = tolerance.bound(case) if tolerance.bound and not sixteen else {}
        faults, deviations = [], {}
        for name, got in after.items():
            want, by_rounding = exact[name], stepwise[name]
            if spec.operand(name).role is Role.STATE:  # only what the compared rows have written
                changed = (want != self._before[name]) | (got != self._before[name])
                changed &= self._written(name, want)
                got, want, by_rounding = (a[changed][None] for a in (got, want, by_rounding))
            if sixteen and got.dtype.kind == "f":
                error = float(np.max(np.abs(got.astype(np.float64) - want), initial=0.0))
                share = share_of_rounding(got, want, by_rounding, sixteen)
                deviations[name] = Deviation(error, share)
                fault = "" if share <= 1 else f" errs by {share:.2f} of what rounding explains"
            else:
                fault, deviations[name] = compare_output(got, want, tolerance, bounds.get(name))
            faults += [f"{name}{fault}"] if fault else []
        return Report(f"{spec.name}, {label}", tuple(faults), deviations)

    def _choose(self) -> _Places:
        call = self._call
        sizes = call.sizes(self._env)
        letter = next(o.axes[0] for o in call.spec.operands if o.axes[0] in "TL" and o.name in call.tensors)
        count = sizes[letter]
        most = count if call.spec.sequential else min(ROWS, count)
        rows = np.unique(np.linspace(0, count - 1, most).astype(np.int64))
        taken = self._index("T")
        tokens = rows if taken is None else self._whole(taken)[rows].astype(np.int64)
        used: list[int] = []
        if (table := block_table(call.spec)) is not None:
            for row, _, context in self._attended(rows):
                used += self._whole(table.name)[row, : -(-context // sizes["S"])].tolist()
        elif (slots := self._index("N", "S")) is not None:
            used = [s // sizes["S"] for s in self._whole(slots)[rows].tolist()]
        blocks = np.array(list(dict.fromkeys(used)), np.int64)
        return _Places(letter, rows, tokens, blocks, {b: i for i, b in enumerate(blocks.tolist())})

    def _index(self, *into: str) -> str | None:
        """The operand in use that numbers entries of these axes."""
        names = [o.name for o in self._call.spec.operands if o.into == into]
        return next((n for n in names if n in self._call.tensors), None)

    @property
    def _paged(self) -> bool:
        return any(o.paged for o in self._call.spec.operands)

    def _attended(self, tokens: Array) -> list[tuple[int, int, int]]:
        """(row, token, keys that it sees) of each token."""
        starts, lens, contexts = (
            self._whole(n).astype(np.int64) for n in ("query_starts", "query_lens", "context_lens")
        )
        found = []
        for t in tokens.tolist():
            row = int(np.flatnonzero((starts <= t) & (t < starts + lens))[0])
            found.append((row, t, int(contexts[row] - (starts[row] + lens[row] - 1 - t))))
        return found

    def _sizes(self) -> dict[str, int]:
        sizes = self._call.sizes(self._env)
        count, p = len(self._places.rows), self._places
        if self._call.spec.sequential:
            return sizes
        sizes |= {"N": len(p.blocks), "Y": 1} if self._paged else {}
        for letter in "TLR":
            if letter in sizes:
                sizes[letter] = count
        sizes |= {letter: len(index) for letter, index in self._columns.items()}
        if (table := block_table(self._call.spec)) is not None:
            sizes["W"] = self._before[table.name].shape[1]
        return sizes

    def _attrs(self) -> dict[str, Any]:
        return self._call.attrs | ({"layer": 0} if self._paged else {})

    def _read(self, names: Any) -> Arrays:
        """Operands as the reference takes them: compared rows, their blocks, weights."""
        arrays: Arrays = {}
        for name in names:
            o = self._call.spec.operand(name)
            axes = o.axes
            if name in self._weights:
                arrays[name] = self._weights[name].copy()
            elif self._call.spec.sequential:
                arrays[name] = self._float(self._whole(name))
            elif o.paged:
                arrays[name] = self._blocks(name)
            elif o.into == ("T",):
                arrays[name] = i32(np.arange(len(self._places.rows)))
            elif o.into == ("N", "S"):
                arrays[name] = self._renumbered_slots(name)
            elif axes[0] in ("T", "L"):
                picked = self._places.rows if axes[0] == self._places.letter else self._places.tokens
                arrays[name] = self._cut(name, self._picked(name, picked))
            elif axes[0] != "R":
                arrays[name] = self._whole(name)
        if (table := block_table(self._call.spec)) is not None and table.name in names:
            arrays |= self._queries(table.name)
        return arrays

    def _queries(self, block_table: str) -> Arrays:
        """Each compared token as a row of its own."""
        seen = self._attended(self._places.rows)
        size = self._call.sizes(self._env)["S"]
        table = self._whole(block_table)
        width = max(-(-context // size) for _, _, context in seen)
        compact = np.zeros((len(seen), width), np.int32)
        for i, (row, _, context) in enumerate(seen):
            used = table[row, : -(-context // size)].tolist()
            compact[i, : len(used)] = [self._places.numbers[b] for b in used]
        return {
            "query_starts": i32(np.arange(len(seen))),
            "query_lens": np.ones(len(seen), np.int32),
            "context_lens": i32([context for _, _, context in seen]),
            block_table: compact,
        }

    def _renumbered_slots(self, name: str) -> Array:
        size = self._call.sizes(self._env)["S"]
        slots = self._whole(name)[self._places.rows].tolist()
        return i32([self._places.numbers[s // size] * size + s % size for s in slots])

    def _written(self, name: str, like: Array) -> Array:
        """Where the compared rows write into a state; an op without slots leaves all of it alone."""
        mask = np.zeros(like.shape, bool)
        if (slots := self._index("N", "S")) is not None:
            places, size = self._renumbered_slots(slots), like.shape[4]
            mask[places // size, :, :, :, places % size] = True
        elif (slots := self._index("Z")) is not None:
            mask[self._picked(slots, self._places.rows)] = True
        else:
            mask[...] = True
        return mask

    def _cut(self, name: str, a: Array) -> Array:
        """The compared columns of what has some of each row's."""
        axes = self._call.spec.operand(name).axes
        index = self._columns.get(axes[1]) if len(axes) == 2 else None
        return a if index is None else np.ascontiguousarray(a[:, index])

    def _tensor(self, name: str) -> DeviceTensor:
        return self._executor.tensor(self._call.tensors[name], self._env)

    def _whole(self, name: str) -> Array:
        return self._tensor(name).numpy(self._ctx.stream)

    def _picked(self, name: str, rows: Array) -> Array:
        t = self._tensor(name)
        row = t.shape[1:]
        nbytes = int(np.prod(row)) * item_bytes(t.dtype)
        parts = [DeviceTensor.at(t.address + int(r) * nbytes, row, t.dtype, t) for r in rows]
        return self._float(np.stack([p.numpy(self._ctx.stream) for p in parts]))

    def _blocks(self, name: str) -> Array:
        """[blocks, 1, 2, G, S, D] of the call's layer."""
        t = self._tensor(name)
        layers, *inside = t.shape[1:]
        each = int(np.prod(inside)) * item_bytes(t.dtype)
        layer = int(self._call.attrs["layer"])
        parts = [
            DeviceTensor.at(t.address + (b * layers + layer) * each, (1, *inside), t.dtype, t)
            for b in self._places.blocks.tolist()
        ]
        return self._float(np.stack([p.numpy(self._ctx.stream) for p in parts]))

    def _float(self, a: Array) -> Array:
        """bf16 comes as float32; f16 is converted to float32 for the reference."""
        return a.astype(np.float32) if a.dtype == np.float16 else a
