"""Finds the op at which a device goes wrong: every step runs on the device and on the reference, op by op."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pegainfer.app.assemble import engine_info
from pegainfer.app.bounds import model_groups, runner_info, step_formats
from pegainfer.app.load import make_backend, open_model
from pegainfer.cli.spec import EngineSpec
from pegainfer.contract.errors import EngineDeadError
from pegainfer.contract.event import TokenEvent
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.ops.backend import Backend
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.reference import Watch
from pegainfer.ops.spec import Role
from pegainfer.ops.tensor import NUMPY, Kind, Sizes, Tensor
from pegainfer.runtime.weights.weight import Weight

Array = np.ndarray[Any, Any]

# States that a device may keep in an order of its own; the reference fills one of its own beside it.
OWN_ORDER = frozenset({"kv"})


@dataclass(frozen=True)
class Difference:
    """How far one operand was off after one call.

    error: max |device - reference| over max |reference|; infinite where only one of them is finite, or where
        whole numbers differ. Of a GPU: |device - reference| over |reference|, each as one vector.
    """

    step: int
    program: str
    index: int  # of the call in the device's program
    op: str
    operand: str
    layer: int | None
    error: float

    def __str__(self) -> str:
        place = f"step {self.step}, {self.program} call {self.index} {self.op}"
        layer = "" if self.layer is None else f" (layer {self.layer})"
        return f"{place}{layer}, operand {self.operand}: relative error {self.error:.2e}"


class Watched(Protocol):
    """A device's executor that can be watched."""

    program: Program

    def run(
        self, inputs: Mapping[str, Array], env: Sizes, watch: Watch | None = None
    ) -> Mapping[str, Array]: ...


def compare(spec: EngineSpec, ids: list[int], answer: int) -> list[Difference]:
    """Runs the prompt `ids` and `answer` greedy tokens through the real engine on a watched device.

    Raises what loading the model raises, and EngineDeadError where the request fails.
    """
    scheduler = dataclasses.replace(spec.scheduler, max_slots=1, pipeline_depth=1)
    room = len(ids) + answer
    config = dataclasses.replace(spec.engine, max_model_len=room, kv_cache_memory=None)
    with open_model(Path(spec.path), quantization=config.quantization) as (model, architecture):
        info = runner_info(model, config, scheduler)
        weights = model.tensors(info.max_model_len)
        device, name = make_backend(weights, config)
        backend = ComparingBackend(device, weights)
        groups = model_groups(model, config)
        runner = model.build(info, groups, backend, steps=step_formats(config), max_logprobs=0)
    told = engine_info(info, spec.name, architecture, name, scheduler.max_logprobs)
    engine = InProcessEngine(runner, told, scheduler)
    sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    try:
        engine.submit(GenerateRequest(id="bisect", prompt=pack_tokens(ids), sampling=sampling), events.put)
        while (event := events.get()).finish is None:
            pass
    finally:
        engine.close()
    if event.error is not None:
        raise EngineDeadError(event.error)
    return backend.found


class ComparingBackend:
    """Implements ops.backend.Backend: the device computes, the reference looks on.

    `found` grows by one Difference for every operand that a call writes, in the order of the calls.
    """

    def __init__(self, device: Backend, weights: Mapping[str, Weight]) -> None:
        self._device = device
        self._constants = {name: w.values() for name, w in weights.items()}
        self.found: list[Difference] = []

    def prepare(self, program: Program, states: Mapping[str, Array], largest: Sizes) -> _Comparing:
        executor: Any = self._device.prepare(program, states, largest)
        return _Comparing(executor, self._constants, states, self.found)

    def close(self) -> None:
        self._device.close()


class _Comparing:
    """One program on both sides. The reference starts each step from the device's inputs, not its results."""

    def __init__(
        self,
        device: Watched,
        constants: Mapping[str, Array],
        states: Mapping[str, Array],
        found: list[Difference],
    ) -> None:
        self._device = device
        self._constants = constants
        self._states = states
        self._own = {n: np.zeros(s.shape, s.dtype) for n, s in states.items() if n in OWN_ORDER}
        self._found = found
        self._steps = 0
        calls = device.program.calls
        self._fine = [Program("", (call,)).lowered(keep=lambda c: False).calls for call in calls]

    def run(self, inputs: Mapping[str, Array], env: Sizes) -> Mapping[str, Array]:
        copies = {n: s.copy() for n, s in self._states.items() if n not in OWN_ORDER}
        arrays = {**self._constants, **inputs, **copies, **self._own}
        index = 0

        def compare(call: OpCall, got: Mapping[str, Array]) -> None:
            nonlocal index
            for fine in self._fine[index]:
                bound = {k: _array_of(t, arrays, env) for k, t in fine.tensors.items()}
                assert fine.spec.reference is not None
                fine.spec.reference(**bound, **fine.attrs)
            for o in call.spec.operands:
                if o.role in (Role.OUT, Role.INOUT) and o.name in got:
                    want = _array_of(call.tensors[o.name], arrays, env)
                    error, name = relative_error(got[o.name], want), self._device.program.name
                    self._found.append(
                        Difference(self._steps, name, index, call.spec.name, o.name, layer_of(call), error)
                    )
            index += 1

        results = self._device.run(inputs, env, compare)
        self._steps += 1
        return results


def _array_of(t: Tensor, arrays: dict[str, Array], env: Sizes) -> Array:
    """The reference's array of a tensor; a buffer is made at its first use."""
    storage = t.storage
    if storage.kind in (Kind.BUFFER, Kind.OUTPUT):
        sizes = storage.sizes(env)
        if storage.name not in arrays or arrays[storage.name].shape != sizes:
            arrays[storage.name] = np.zeros(sizes, NUMPY[storage.dtype])
    found = arrays[storage.name]
    return found if t.kind in (Kind.WEIGHT, Kind.STATE) else found.reshape(t.sizes(env))


def layer_of(call: OpCall) -> int | None:
    """From the call's attribute, else from a weight's name such as 'layers.3.wo'."""
    if "layer" in call.attrs:
        return int(call.attrs["layer"])
    for t in call.tensors.values():
        parts = t.name.split(".")
        if parts[0] == "layers" and len(parts) > 1:
            return int(parts[1])
    return None


def relative_error(got: Array, want: Array) -> float:
    """max |got - want| over max |want|; see Difference.error."""
    if want.size == 0:
        return 0.0
    if want.dtype.kind in "iu":
        return 0.0 if np.array_equal(got, want) else float("inf")
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    error = np.abs(got[finite].astype(np.float64) - want[finite]).max()
    return float(error / max(np.abs(want[finite]).max(), np.finfo(np.float32).tiny))
