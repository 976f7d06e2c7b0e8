"""What the GPU's runner is given: programs on the device, histories and tables, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pegainfer.contract.step import RunnerInfo
from pegainfer.kv.device.cuda_pool import CudaPools
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.ops.program import Program
from pegainfer.ops.tensor import Kind, Sizes
from pegainfer.runner.program import largest_step
from pegainfer.runner.resident import ResidentState
from pegainfer.runtime.cuda.device import Device
from pegainfer.runtime.cuda.module import Kernel
from pegainfer.runtime.cuda.stream import Event, Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor

Array = np.ndarray[Any, Any]
Work = Callable[[Stream], None]
MakeInputs = Callable[[Callable[[str], int]], Work]  # from the address of each input to what fills them


class Executor(Protocol):
    """A program on the device; lower/cuda/executor.py documents each member."""

    program: Program

    def run(self, inputs: Mapping[str, Array], env: Sizes) -> Mapping[str, DeviceTensor]: ...

    def replay(self, env: Sizes, decode_only: bool) -> Mapping[str, DeviceTensor]: ...

    def launches(self, env: Sizes, decode_only: bool = False) -> Sequence[Work]: ...

    def outputs(self, env: Sizes) -> Mapping[str, DeviceTensor]: ...

    def input_address(self, name: str, env: Sizes) -> int: ...

    def capture(
        self,
        env: Sizes,
        decode_only: bool,
        *,
        graph: bool = True,
        at_once: bool = True,
        make_inputs: MakeInputs | None = None,
    ) -> None: ...


class Library(Protocol):
    """Compiled kernels by name; see kernels/load.py."""

    def kernel(self, name: str) -> Kernel: ...


class Context(Protocol):
    """One GPU; see lower/cuda/context.py."""

    @property
    def device(self) -> Device: ...

    @property
    def stream(self) -> Stream: ...

    @property
    def library(self) -> Library: ...

    def check(self) -> None: ...


class Options(Protocol):
    """How programs run; see lower/cuda/options.py."""

    @property
    def graphs(self) -> bool: ...


class CudaBackend(Protocol):
    """What makes programs ready on a GPU; lower/cuda/backend.py documents each member."""

    @property
    def ctx(self) -> Context: ...

    @property
    def options(self) -> Options: ...

    def prepare(
        self,
        program: Program,
        states: Mapping[str, DeviceTensor],
        largest: Sizes,
        bound: Mapping[str, DeviceTensor] | None = None,
    ) -> Executor: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What runs steps on the device.

    Args:
        forward, sampler, prompt_logprobs, hidden_states: the programs of a line, bound to `state`, `pools`
            and each other.
        adapted: the forward pass of steps in which a row has an adapter; None: `forward` serves all steps.
        inputs: names of the inputs of either forward pass.
        graphs: whether captured steps are graphs.
        check: raises PeerFailedError where a step that has ended is not to be used, because a rank failed.
        close: waits for the device and releases everything.
    """

    device: Device
    stream: Stream
    forward: Executor
    adapted: Executor | None
    sampler: Executor
    prompt_logprobs: Executor
    hidden_states: Executor
    inputs: frozenset[str]
    state: ResidentState
    pools: CudaPools
    graphs: bool
    check: Callable[[], None]
    close: Callable[[], None]

    def forward_of(self, adapted: bool) -> Executor:
        """The forward pass of a step; adapted: whether one of its rows has an adapter."""
        return self.adapted if adapted and self.adapted is not None else self.forward

    def wait(self, ended: Event, step: object) -> None:
        """Returns on any thread when the step has ended. Raises what it raised, and what `check` does."""
        self.device.enter()
        ended.wait(step)
        self.check()


def make_parts(
    programs: Mapping[str, Program],
    info: RunnerInfo,
    groups: Sequence[GroupLayout],
    backend: CudaBackend,
    adapters: Mapping[str, DeviceTensor],
    plain: Program | None = None,
) -> Parts:
    """Takes all memory that steps will need. Then load the backend's weights, then start the runner.

    Args:
        programs: by the fields of runner/host.py's Programs.
        plain: the forward pass of steps without adapters; None: programs['forward'] serves all.
        groups: those that `info` and the forward program were made from.
        adapters: states of the programs that hold adapters.

    Raises CudaError where memory is short, UnsupportedError where no kernel serves an op.
    """
    ctx, largest = backend.ctx, largest_step(info)
    inputs = frozenset(t.name for t in programs["forward"].tensors(Kind.INPUT))
    state = ResidentState(ctx.stream, ctx.library.kernel, info, inputs, ctx.device.info.pdl)
    pools = CudaPools(groups, info.num_blocks)
    forward = backend.prepare(programs["forward"], {**pools.states, **adapters}, largest, state.bound)
    outputs = forward.outputs(largest)
    logits, x = outputs["logits"], outputs["x"]
    adapted = None
    if plain is not None:
        adapted = forward
        forward = backend.prepare(plain, pools.states, largest, {**state.bound, **outputs})
    sampler = backend.prepare(programs["sampler"], {"history": state.history}, largest, {"logits": logits})
    prompt_logprobs = backend.prepare(programs["prompt_logprobs"], adapters, largest, {"x": x})
    hidden_states = backend.prepare(programs["hidden_states"], {}, largest, {"x": x})
    return Parts(
        ctx.device, ctx.stream, forward, adapted, sampler, prompt_logprobs, hidden_states, inputs, state,
        pools, backend.options.graphs, ctx.check, backend.close,
    )  # fmt: skip
