"""One checker for every backend: runs an op's case on it and holds the outcome against the reference.

Beside the values it looks at what nobody asked for: bytes around every array (filled so that floats read
there are NaN), operands that are only read, places of a state that the op should leave alone, outputs not
written whole (they hold NaN, or the least int, beforehand).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from pegainfer.ops import float8, stored
from pegainfer.ops.compose import dtype_name, one_call, run_reference, staged_inputs
from pegainfer.ops.program import Program
from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.spec import Arrays, Case, OpSpec, Role, Tolerance
from pegainfer.ops.tensor import FORMATS, NUMPY, Sizes
from pegainfer.runtime.weights.weight import Weight

Array = np.ndarray[Any, Any]

GUARD_BYTES = 256  # on each side of an array: more than any kernel's widest store
GUARD = 0xFF  # as floats of any width: NaN
# An output stored in fewer bits may fall on the other side of a rounding border: one unit in its last place.
_STORAGE = {"<f2": (2.0**-10, 2.0**-24), "|u1": (float8.STEP, float8.LEAST), "<u2": (2.0**-7, 2.0**-133)}


@dataclass(frozen=True)
class Trial:
    """What a backend runs. It writes outputs into `arrays`, in place.

    Args:
        arrays: every operand but weights, C-contiguous, 64-byte aligned, guarded; states in the reference's
            layout.
        weights: as they are stored.
    """

    spec: OpSpec
    sizes: Mapping[str, int]
    attrs: Mapping[str, Any]
    arrays: Arrays
    weights: dict[str, Weight]


@dataclass(frozen=True)
class Deviation:
    """How far an output is from the reference at its worst place."""

    error: float  # |got - want|
    share: float  # of what the tolerance allows there


@dataclass(frozen=True)
class Report:
    """The outcome of one case: empty `faults` means it passed."""

    label: str
    faults: tuple[str, ...]
    deviations: dict[str, Deviation]


def suitable_cases(spec: OpSpec, seed: int, dtypes: Mapping[str, str] | None = None) -> list[Case]:
    """The op's cases that these dtypes can hold: whole blocks of weights, no finite value past float16."""
    cases = spec.cases(np.random.default_rng(seed)) if spec.cases is not None else []
    dtypes = dtypes or {}
    if dtypes.get("kv") != float8.E4M3:  # no other cache is scaled
        cases = [c for c in cases if not c.attrs.keys() & spec.defaults.keys()]
    return [c for c in cases if all(_holds(spec, c, name, dtype) for name, dtype in dtypes.items())]


def _holds(spec: OpSpec, case: Case, name: str, dtype: str) -> bool:
    if name not in case.arrays:
        return True
    a = case.arrays[name]
    if spec.operand(name).role is Role.WEIGHT:
        return int(a.shape[-1]) % FORMATS[dtype][0] == 0
    return dtype != "f16" or not bool((np.abs(a[np.isfinite(a)]) > 65504).any())


def check_case(
    spec: OpSpec,
    case: Case,
    run: Callable[[Trial], None],
    *,
    arithmetic: str = "f32",
    dtypes: Mapping[str, str] | None = None,
) -> Report:
    """Runs one case on a backend and compares.

    Args:
        run: the backend.
        arithmetic: which of the op's tolerances applies.
        dtypes: storage of operands that differ from the case's own, float32 or whole numbers: weights by
            format ('q4_1'), states and activations by dtype ('f16').
    """
    dtypes = dtypes or {}
    trial, around = _prepare(spec, case, dtypes)
    given = {name: a.copy() for name, a in trial.arrays.items()}
    plain = {k: w.values() for k, w in trial.weights.items()}
    want = {name: a.copy() for name, a in given.items()}
    tolerance = spec.tolerance[arithmetic]
    bounds = tolerance.bound(replace(case, arrays={**given, **plain})) if tolerance.bound else {}
    run_reference(spec, case.sizes, {**want, **plain}, case.attrs)
    run(trial)

    faults = [f"{name}: bytes around it were written" for name, parts in around.items() if _hurt(parts)]
    deviations = {}
    for o in spec.operands:
        if o.name not in want:
            continue
        got = trial.arrays[o.name]
        if o.role is Role.IN:
            if got.tobytes() != given[o.name].tobytes():
                faults.append(f"{o.name}: only to be read, but was written")
            continue
        fault, deviations[o.name] = compare_output(got, want[o.name], tolerance, bounds.get(o.name))
        faults += [f"{o.name}{fault}"] if fault else []
    return Report(f"{spec.name}, {case.label}", tuple(faults), deviations)


def _prepare(
    spec: OpSpec, case: Case, dtypes: Mapping[str, str]
) -> tuple[Trial, dict[str, tuple[Array, Array]]]:
    """The call with its arrays guarded, and each array's guard bytes."""
    weights: dict[str, Weight] = {}
    given: Arrays = {}
    for o in spec.operands:
        dtype = dtypes.get(o.name)
        if o.role is Role.OUT:
            shape = tuple(int(x) if x.isdigit() else case.sizes[x] for x in o.axes)
            given[o.name] = _unwritten(shape, NUMPY[dtype or o.dtypes[0]])
        elif o.name not in case.arrays:
            continue  # an optional operand
        elif o.role is Role.WEIGHT:
            weights[o.name] = quantized_weight(dtype or "f32", case.arrays[o.name])
        else:
            given[o.name] = _stored(case.arrays[o.name], dtype)
    guarded = {name: _guarded(a) for name, a in given.items()}
    arrays = {name: a for name, (a, _) in guarded.items()}
    around = {name: parts for name, (_, parts) in guarded.items()}
    return Trial(spec, case.sizes, case.attrs, arrays, weights), around


Execute = Callable[[Program, Mapping[str, Weight], Arrays, Arrays, Sizes], Mapping[str, Array]]


def through_program(execute: Execute) -> Callable[[Trial], None]:
    """A `run` that records the call as a program, so that it is executed as a model's calls are.

    Args:
        execute: runs a program once. Takes it with its weights, its states in the reference's layout (written
            back in place), its inputs, and the sizes of the step; returns the outputs by name.
    """

    def run(trial: Trial) -> None:
        spec, arrays = trial.spec, trial.arrays
        dtypes = {k: dtype_name(a) for k, a in arrays.items()}
        dtypes |= {k: w.dtype for k, w in trial.weights.items()}
        program = one_call(spec, trial.sizes, dtypes, trial.attrs)
        states = {o.name: arrays[o.name] for o in spec.operands if o.role is Role.STATE}
        outputs = execute(program, trial.weights, states, staged_inputs(spec, arrays), trial.sizes)
        for name, value in outputs.items():
            arrays[name][...] = value

    return run


def _stored(a: Array, dtype: str | None) -> Array:
    with np.errstate(over="ignore"):
        return a if dtype is None else stored.held(a, dtype)


def _unwritten(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.full(shape, np.nan if dtype.kind == "f" else np.iinfo(dtype).min, dtype)


def _guarded(a: Array) -> tuple[Array, tuple[Array, Array]]:
    """A copy of `a` amid guard bytes, and those before and after it."""
    whole = np.full(a.nbytes + 2 * GUARD_BYTES + 64, GUARD, np.uint8)
    start = GUARD_BYTES + -(whole.ctypes.data + GUARD_BYTES) % 64
    inside = whole[start : start + a.nbytes]
    copy = inside.view(a.dtype).reshape(a.shape)
    copy[...] = a
    return copy, (whole[:start], whole[start + a.nbytes :])


def _hurt(around: tuple[Array, Array]) -> bool:
    return any((part != GUARD).any() for part in around)


def compare_output(
    got: Array, want: Array, tolerance: Tolerance, bound: Array | None
) -> tuple[str, Deviation]:
    """A description of the worst place if it is past the tolerance, else '', and the deviation there.

    Args:
        bound: what Tolerance.bound gives for this output; None for nothing.
    """
    if want.size == 0:
        return "", Deviation(0.0, 0.0)
    stored_as = want.dtype.str
    got, want = stored.plain(got), stored.plain(want)
    if want.dtype.kind != "f":
        wrong = got != want
        error = np.abs(got.astype(np.float64) - want.astype(np.float64))
        allowed = np.zeros(want.shape)
    else:
        g, w = got.astype(np.float64), want.astype(np.float64)
        same = (g == w) | (np.isnan(g) & np.isnan(w))
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0.0, np.abs(g - w))
            allowed = tolerance.atol + tolerance.rtol * np.abs(w) + (0.0 if bound is None else bound)
        if bound is not None and stored_as in _STORAGE:
            relative, least = _STORAGE[stored_as]
            allowed = allowed + relative * np.abs(w) + least
        allowed = np.where(np.isfinite(w), np.broadcast_to(allowed, want.shape), 0.0)
        wrong = ~same & ~(error <= allowed)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(error == 0, 0.0, error / allowed)
    share = np.where(np.isnan(share), np.inf, share)
    at = np.unravel_index(int(np.argmax(share)), want.shape)
    deviation = Deviation(float(np.max(np.where(np.isnan(error), np.inf, error))), float(share[at]))
    if not wrong.any():
        return "", deviation
    where = [int(i) for i in at]
    fault = f"{where}: expected {want[at]} ± {allowed[at]:.3g}, got {got[at]}"
    return f"{fault}; {int(wrong.sum())} of {want.size} wrong", deviation
