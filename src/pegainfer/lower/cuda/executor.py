"""Runs a recorded program on the GPU: launches packed once for each set of sizes, or replayed as a graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.lower.cuda.bind import Binder, Memory, Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.inputs import InputStage, Layout
from pegainfer.lower.cuda.lowered import CapturedSteps, LoweredStep
from pegainfer.lower.cuda.lowering import Step, keeps_whole
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.plan import StepPlan
from pegainfer.lower.cuda.planning import plan_step, rules
from pegainfer.lower.cuda.store import WeightStore
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.tensor import Kind, Sizes, Tensor
from pegainfer.runtime.cuda.driver import errors_at
from pegainfer.runtime.cuda.memory import DeviceBuffer, aligned
from pegainfer.runtime.cuda.tensor import DeviceTensor

Array = np.ndarray[Any, Any]
MakeInputs = Callable[[Callable[[str], int]], Work]
KEPT_VIEWS = 1024
KEPT_STEPS = 64  # sets of sizes without a graph whose launches stay packed


class CudaExecutor:
    """A program bound to device memory, made by CudaBackend.prepare. One thread, one stream.

    Args:
        program: coarse calls stay whole where a fused form serves them.
        states: device tensors of the declared shape and dtype; a KV cache in the reference's order.
        bound: inputs and outputs that are device memory already, those of another program; never staged.
        largest: the greatest value of each symbolic size of a buffer or output.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightStore,
        states: Mapping[str, DeviceTensor],
        largest: Sizes,
        options: CudaOptions,
        *,
        ctx: CudaContext,
        bound: Mapping[str, DeviceTensor] | None = None,
    ) -> None:
        """Raises UnsupportedError where no kernel serves an op, OpError where a state does not fit."""
        self.program = program.lowered(keep=keeps_whole, ranks=ctx.target.ranks)
        self.largest = dict(largest)
        self.options = options
        self._ctx = ctx
        self._weights = weights
        self._inputs = {t.name: t for t in self.program.tensors(Kind.INPUT)}
        self._outputs = {t.name: t for t in self.program.tensors(Kind.OUTPUT)}
        self._symbols = sorted(
            {d for c in self.program.calls for t in c.tensors.values() for d in t.shape if isinstance(d, str)}
        )
        plan = self.program.plan_arena(largest, elsewhere=bound or ())
        self._arena = DeviceBuffer(aligned(plan.size), f"arena of {program.name}")
        self._places = {t: self._arena.address + offset for t, offset in plan.offsets.items()}
        self._bind(states, bound or {})
        self._scratch = DeviceBuffer(0, "scratch")
        staged = [t for t in self._inputs.values() if t not in self._places]
        self._stage = InputStage(program.name, staged, options.padding)
        self._kept: dict[str, DeviceBuffer] = {}
        self._constants: dict[object, int] = {}  # addresses of weights
        self._steps: OrderedDict[tuple[int, ...], LoweredStep] = OrderedDict()
        self._captured = CapturedSteps(program.name, self._symbols)
        self._views: OrderedDict[tuple[int, ...], dict[str, DeviceTensor]] = OrderedDict()
        self._step_number = 0
        self._lower({s: self.largest.get(s, 1) for s in self._symbols}, False, tune=False)  # asks for weights

    # Steps

    def run(self, inputs: Mapping[str, Array], env: Sizes) -> dict[str, DeviceTensor]:
        """Puts one step on the stream and returns its outputs, valid until the next step.

        Args:
            inputs: host arrays of the declared shapes; they may be changed as soon as this returns.
            env: this step's sizes; others than the program's own are ignored.

        Raises OpError for inputs that do not fit; CudaError names the step and the launch.
        """
        decode_only = self._decode_only(inputs)
        if (step := self._find(env, decode_only)).made:
            raise OpError(f"program {self.program.name} makes the inputs of such a step itself", got=env)
        self._launch(step, inputs, env)
        return self.outputs(env)

    def replay(self, env: Sizes, decode_only: bool) -> dict[str, DeviceTensor]:
        """As `run`, on inputs that are on the device: those that the step makes itself, or the last run's.

        Raises OpError for sizes that were not captured.
        """
        self._launch(self._captured.must_find(env, decode_only), None, env)
        return self.outputs(env)

    def launches(self, env: Sizes, decode_only: bool = False) -> list[Work]:
        """What `replay` puts on the stream, for a graph that does more. Raises OpError as it does."""
        return self._captured.must_find(env, decode_only).work

    def outputs(self, env: Sizes) -> dict[str, DeviceTensor]:
        """All outputs in the shape of `env`; the same objects for the same sizes."""
        key = tuple(env[s] for s in self._symbols)
        if key not in self._views:
            if len(self._views) == KEPT_VIEWS:
                self._views.popitem(last=False)
            self._views[key] = {name: self.output(name, env) for name in self._outputs}
        return self._views[key]

    def _launch(self, step: LoweredStep, inputs: Mapping[str, Array] | None, env: Sizes) -> None:
        stream = self._ctx.stream
        self._step_number += 1
        with errors_at(self.program.name, "step", self._step_number):
            if inputs is not None:
                self._stage.send(step.inputs, inputs, env, stream)
            step(stream)

    def output(self, name: str, env: Sizes) -> DeviceTensor:
        """An output in the shape of `env`."""
        t = self._outputs[name]
        return DeviceTensor.at(self._places[t], t.sizes(env), t.dtype, self._arena)

    def input_address(self, name: str, env: Sizes, decode_only: bool = False) -> int:
        """Where a step of these sizes reads an input; for as long as its graph lives, if it was captured."""
        return self._address(self._inputs[name], self._find(env, decode_only).inputs)

    def capture(
        self,
        env: Sizes,
        decode_only: bool,
        *,
        graph: bool = True,
        at_once: bool = True,
        make_inputs: MakeInputs | None = None,
    ) -> None:
        """Makes a graph for these sizes ready; later steps of the same kind that fit are padded to them.

        Args:
            graph: without, or without CudaOptions.graphs, the launches are kept as a list.
            at_once: otherwise the graph is made when such a step first comes, which then takes 1 to 6 ms
                longer: a graph of 200 to 500 launches holds 1 to 4 MB of the host's memory.
            make_inputs: from the address of each input to a launch that fills them all, ahead of all others;
                such steps are replayed, not run.

        Weights must have been loaded. Runs the step once, on nothing but padding: no state changes.
        """
        sizes = {s: env[s] for s in self._symbols}
        step = self._lower(sizes, decode_only, tune=self.options.tune)
        if make_inputs is not None:
            step.begin_with(make_inputs(lambda name: self._address(self._inputs[name], step.inputs)))
        what = f"{self.program.name} {sizes}{' decode' if decode_only else ''}"
        if graph and self.options.graphs:
            self._stage.send_padding(step.inputs, self._ctx.stream)
            self._ctx.run_alone(lambda: step.run_once(self._ctx.stream, what))
            if at_once:
                step.make_graph(self._ctx.stream)
        self._captured.add(step, decode_only)

    def explain(self, env: Sizes, decode_only: bool = False) -> str:
        """The launches of a step of these sizes, one a line, each with the reason of its choice."""
        return str(self._plan(self._find(env, decode_only).env, decode_only))

    def work(self, env: Sizes, decode_only: bool = False) -> list[tuple[OpCall, list[Work]]]:
        """Each call of a step of these sizes with its launches; this executor holds the memory they use."""
        return self._calls(self._lowered({s: env[s] for s in self._symbols}, decode_only))

    def begin(self, env: Sizes, decode_only: bool = False) -> None:
        """Puts on the stream what a step does ahead of its calls (work lists), for who runs `work` alone.

        Inputs are those of the last step.
        """
        step = self._lowered({s: env[s] for s in self._symbols}, decode_only)
        for ahead in step.work[: step.ahead]:
            ahead(self._ctx.stream)

    def _calls(self, step: LoweredStep) -> list[tuple[OpCall, list[Work]]]:
        ends = accumulate(step.counts, initial=step.ahead)
        parts = (step.work[start : start + n] for start, n in zip(ends, step.counts, strict=False))
        return list(zip(self.program.calls, parts, strict=True))

    def walk(
        self, inputs: Mapping[str, Array], env: Sizes
    ) -> Iterator[tuple[OpCall, list[Work], Callable[[], None]]]:
        """One step, call by call: yields each call with its launches and a function that runs them and waits.

        The function must be called before the next call is asked for. Each call leaves all that it declares:
        launches that do the end of one call in the next are not taken.
        """
        decode_only = self._decode_only(inputs)
        step = self._lowered({s: env[s] for s in self._symbols}, decode_only, fused=False)
        self._stage.send(step.inputs, inputs, env, self._ctx.stream)
        for ahead in step.work[: step.ahead]:
            ahead(self._ctx.stream)
        for call, work in self._calls(step):

            def run(call: OpCall = call, work: list[Work] = work) -> None:
                for w in work:
                    w(self._ctx.stream)
                self._ctx.stream.synchronize(call)

            yield call, work, run

    def tensor(self, t: Tensor, env: Sizes) -> DeviceTensor:
        """Any buffer, output, state or staged input, as the step under way has it."""
        address = self._places.get(t.storage)
        if address is None:
            step = self._lowered({s: env[s] for s in self._symbols}, False)
            address = step.inputs.address(t.storage)
        return DeviceTensor.at(address, t.sizes(env), t.dtype, self)

    def _decode_only(self, inputs: Mapping[str, Array]) -> bool:
        lens = inputs.get("query_lens")
        return lens is not None and int(lens.max(initial=0)) <= 1

    # Lowering

    def _find(self, env: Sizes, decode_only: bool) -> LoweredStep:
        """The smallest graph that the step fits into, else its launches."""
        if missing := [s for s in self._symbols if s not in env]:
            raise OpError(
                f"program {self.program.name}: sizes of a step", expected=self._symbols, got=missing
            )
        for s in self._symbols:
            if env[s] > self.largest.get(s, env[s]):
                raise OpError(
                    f"program {self.program.name}: size {s} of a step",
                    expected=f"at most {self.largest[s]}", got=env[s],
                )  # fmt: skip
        found = self._captured.find(env, decode_only)
        return found or self._lowered({s: env[s] for s in self._symbols}, decode_only)

    def _lowered(self, env: dict[str, int], decode_only: bool, fused: bool = True) -> LoweredStep:
        key = (int(decode_only), int(fused), *env.values())
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._lower(env, decode_only, tune=False, fused=fused)
            if len(self._steps) > KEPT_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step

    def _plan(self, env: Sizes, decode_only: bool, fused: bool = True) -> StepPlan:
        applied = rules(row_pass=self.options.row_pass, fused=fused)
        with errors_at(f"lowering {self.program.name}"):
            return plan_step(self.program.calls, Step(self._ctx.target, env, decode_only), applied)

    def _lower(
        self, env: dict[str, int], decode_only: bool, *, tune: bool, fused: bool = True
    ) -> LoweredStep:
        inputs = self._stage.layout(env)
        plan = self._plan(env, decode_only, fused)
        if plan.scratch_bytes > self._scratch.nbytes:  # steps bound before hold on to the smaller one
            self._scratch = DeviceBuffer(plan.scratch_bytes, f"scratch of {self.program.name}")
        kept = {name: self._keep(name, nbytes) for name, nbytes in plan.memory.items()}
        for name in plan.zeroed:
            self._ctx.stream.fill(kept[name].address, 0, kept[name].nbytes)

        def address(t: Tensor) -> int:
            return kept[t.name].address if t.name in kept else self._address(t, inputs)

        memory = Memory(address, self._scratch.address, lambda name: kept[name].address)
        binder = Binder(self._ctx, self._weights, memory, tune=tune, constants=self._constants)
        with errors_at(f"lowering {self.program.name}"):
            work = binder.bind(list(plan.launches))
        return LoweredStep(
            dict(env), work, len(plan.ahead), plan.counts(), inputs, (self._scratch, *kept.values())
        )

    def _address(self, t: Tensor, inputs: Layout) -> int:
        return self._places[t] if t in self._places else inputs.address(t)

    def _keep(self, key: str, nbytes: int) -> DeviceBuffer:
        held = self._kept.get(key)
        if held is None or held.nbytes < nbytes:
            held = self._kept[key] = DeviceBuffer(nbytes, key)
        return held

    def _bind(self, states: Mapping[str, DeviceTensor], bound: Mapping[str, DeviceTensor]) -> None:
        self._held = [*states.values(), *bound.values()]
        for t in self.program.tensors(Kind.STATE):
            state = states.get(t.name)
            if state is None or state.shape != t.shape or state.dtype != t.dtype or not state.contiguous:
                raise OpError(
                    f"program {self.program.name}: state {t}", expected="contiguous", got=state or "nothing"
                )
            self._places[t] = state.address
        for name, tensor in bound.items():
            t = self._inputs.get(name) or self._outputs[name]
            if tensor.dtype != t.dtype:
                raise OpError(f"program {self.program.name}: bound {t.kind} {t}", got=tensor)
            self._places[t] = tensor.address
