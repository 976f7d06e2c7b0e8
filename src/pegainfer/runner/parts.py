"""What the GPU's runner is given: programs on the device, histories and tables, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pegainfer.ops.tensor import Sizes
from pegainfer.runtime.cuda.device import Device
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor

Array = np.ndarray[Any, Any]
Work = Callable[[Stream], None]
MakeInputs = Callable[[Callable[[str], int]], Work]  # from the address of each input to what fills them


class Executor(Protocol):
    """A program on the device; kernels/cuda/executor.py documents each member."""

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


class State(Protocol):
    """Histories and block tables on the device; kernels/cuda/resident.py documents each member."""

    history: DeviceTensor

    def enter(self, slot: int, tokens: Array) -> None: ...

    def extend(self, slots: list[int], places: list[int], blocks: list[int]) -> None: ...

    def gather(self, slots: Array, token_places: Array) -> None: ...

    def enter_batch(self, slots: Array, positions: Array, logit_rows: Array) -> None: ...

    def publish(self, tokens: int, status: int, rows: int, ring: tuple[int, int, int]) -> Work: ...

    def decode_inputs(self, rows: int, address: Callable[[str], int], counters: Sequence[int]) -> Work: ...


@dataclass(frozen=True)
class Parts:
    """What runs steps on the device, made by app/gpu.py.

    Args:
        forward, sampler, prompt_logprobs, hidden_states: the programs of runner/model.py, bound to `state`,
            `pool` and each other.
        pool: the KV cache, [N, …].
        graphs: whether captured steps are graphs.
        close: waits for the device and releases everything.
    """

    device: Device
    stream: Stream
    forward: Executor
    sampler: Executor
    prompt_logprobs: Executor
    hidden_states: Executor
    state: State
    pool: DeviceTensor
    graphs: bool
    close: Callable[[], None]
