"""Runs a recorded program on the C++ kernels: one call a step, without the GIL."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from pegainfer.contract.errors import ConfigError, OpError
from pegainfer.kernels.cpu.instructions import OPCODES
from pegainfer.kernels.cpu.library import ERROR_BYTES, library
from pegainfer.lower.cpu.encode import encode
from pegainfer.lower.cpu.packed import PackedWeight
from pegainfer.lower.cpu.threads import ThreadPool
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.tensor import NUMPY, Kind, Sizes, Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.rank_memory import RankMemory

Array = np.ndarray[Any, Any]
Watch = Callable[[OpCall, Mapping[str, Array]], None]


class CpuExecutor:
    """A program bound to memory, made by CpuBackend.prepare. Not thread-safe.

    Args:
        program: lowered to ops that have kernels.
        constants: a PackedWeight for each matrix, float32 arrays for the rest.
        states: arrays by name, C-contiguous, of the declared shape and dtype.
        largest: the greatest value of each symbolic size of a buffer or output.
        pool, kernels, int8, bf16, timing: see CpuOptions.
        memory: of the group of ranks; None: there is one rank.

    Raises OpError where states or sizes do not fit.
    """

    def __init__(
        self,
        program: Program,
        constants: Mapping[Tensor, PackedWeight | Array],
        states: Mapping[str, Array],
        largest: Sizes,
        *,
        pool: ThreadPool,
        kernels: int,
        int8: bool,
        bf16: bool,
        timing: bool,
        memory: RankMemory | None = None,
    ) -> None:
        self.program = program
        self.largest = dict(largest)
        self.arena_bytes = 0
        self._pool = pool
        self._ranks = memory
        self._lib = library()
        self._memory: dict[Tensor, Array] = {}  # buffers and outputs, flat, at their largest
        self._given: dict[str, Array] = {}  # the last step's inputs, which C++ reads in place
        self._results: dict[str, Array] = {}  # the outputs in the shapes of the last step's sizes
        self._place: dict[Tensor, int] = {t: i for i, t in enumerate(program.tensors())}
        self._table = np.zeros(len(self._place) + 1, np.uint64)  # addresses; C++ reads it in each step
        self._keep: list[object] = [pool, *constants.values()]  # what C++ points into
        self._inputs = {t.name: t for t in program.tensors(Kind.INPUT)}
        self._outputs = {t.name: t for t in program.tensors(Kind.OUTPUT)}
        for t, constant in constants.items():
            self._set(t, constant.handle if isinstance(constant, PackedWeight) else _address(constant))
        self._bind_states(states)
        self._allocate()
        self._create(kernels, int8, bf16)
        self._nanoseconds = np.zeros(len(program.calls), np.int64) if timing else None

    # Steps

    def run(self, inputs: Mapping[str, Array], env: Sizes, watch: Watch | None = None) -> dict[str, Array]:
        """One step. Writes states in place; returns views of the outputs, valid until the next step.

        Args:
            inputs: all of them, of the declared dtype. They are read where they lie, so that an array passed
                again, with whatever it holds by then, costs nothing; one that is not contiguous is copied.
            env: this step's sizes.
            watch: called after every call with those of its arrays that are not packed weights or states.

        Raises OpError where an input is missing or has another shape, a size exceeds the largest, or an index
        points outside of what it indexes; nothing has been computed then. Raises EngineDeadError where a rank
        of the group has failed.
        """
        self._set_sizes(env)
        for name, array in inputs.items():
            if self._given.get(name) is not array:
                self._stage(name, array, env)
        if len(inputs) != len(self._inputs):
            missing = [name for name in self._inputs if name not in inputs]
            raise OpError(f"program {self.program.name}: no input {' '.join(missing)}", got=" ".join(inputs))
        if watch is None:
            self._run(0, len(self.program.calls))
        else:
            for i, call in enumerate(self.program.calls):
                self._run(i, i + 1)
                watch(call, {k: self._seen(t, env) for k, t in call.tensors.items() if self._plain(t)})
        return self._results

    def timings(self) -> list[tuple[OpCall, int]]:
        """Nanoseconds that each call has taken so far, summed over steps; needs CpuOptions.timing."""
        if self._nanoseconds is None:
            raise ConfigError("calls are not timed", remedy="CpuOptions(timing=True)")
        return list(zip(self.program.calls, self._nanoseconds.tolist(), strict=True))

    @property
    def clipped(self) -> int:
        """Keys and values past the largest number of an 8-bit KV cache's format so far, stored as that."""
        return int(self._lib.pega_exec_clipped(self._handle))

    def reset_timings(self) -> None:
        if self._nanoseconds is not None:
            self._nanoseconds[:] = 0

    def _stage(self, name: str, array: Array, env: Sizes) -> None:
        """Points the program at an input."""
        t = self._inputs.get(name)
        if t is None:
            raise OpError(f"program {self.program.name}: no input {name}", expected=" ".join(self._inputs))
        shape = t.sizes(env)
        if array.shape != shape or array.dtype != NUMPY[t.dtype]:
            raise OpError(
                f"program {self.program.name}: input {t}",
                expected=f"{t.dtype} {shape}", got=f"{array.dtype} {array.shape}",
            )  # fmt: skip
        held = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        self._given[name] = held
        self._set(t, _address(held))

    def _set_sizes(self, env: Sizes) -> None:
        """Sets the step's sizes. If they differ from those of the last step, inputs are checked and outputs
        shaped again."""
        for i, name in enumerate(self._sizes):
            size = env.get(name, -1)
            if size < 0 or size > self.largest.get(name, size):
                raise OpError(
                    f"program {self.program.name}: size {name} of a step",
                    expected=f"0 to {self.largest.get(name, 'any')}", got=env.get(name),
                )  # fmt: skip
            if self._env[i] != size:
                self._env[i] = size
                self._results = {}
        if not self._results:
            self._given.clear()
            self._results = {name: self._view(t, env) for name, t in self._outputs.items()}

    def _run(self, first: int, last: int) -> None:
        timers = None if self._nanoseconds is None else self._nanoseconds.ctypes.data
        if not self._lib.pega_exec_run(self._handle, self._env, len(self._sizes), first, last, timers):
            if self._ranks is not None:
                self._ranks.check()
            message = self._lib.pega_exec_error(self._handle).decode()
            raise OpError(f"program {self.program.name}: {message}")

    # Binding

    def _bind_states(self, states: Mapping[str, Array]) -> None:
        for t in self.program.tensors(Kind.STATE):
            state = states.get(t.name)
            if state is None:
                raise OpError(f"program {self.program.name}: no state for {t}")
            if state.shape != t.shape or state.dtype != NUMPY[t.dtype] or not state.flags.c_contiguous:
                raise OpError(
                    f"program {self.program.name}: state {t.name}",
                    expected=f"{t}, C-contiguous", got=f"{state.dtype} {state.shape}",
                )  # fmt: skip
            self._keep.append(state)
            self._set(t, _address(state))

    def _allocate(self) -> None:
        """Gives buffers their place in one arena."""
        plan = self.program.plan_arena(self.largest)
        self.arena_bytes = plan.size
        arena = _mapped(plan.size)
        for t, offset in plan.offsets.items():
            self._keep_flat(t, arena[offset : offset + t.nbytes(self.largest)])

    def _create(self, kernels: int, int8: bool, bf16: bool) -> None:
        calls = self.program.calls
        self._sizes: list[str] = []
        code = b"".join(
            encode(c, OPCODES.index(c.spec.name), lambda t: self._place[t.storage], self._sizes)
            for c in calls
        )
        numbers = ctypes.c_int64 * max(1, len(self._sizes))
        self._env = numbers()
        greatest = numbers(*(self.largest.get(name, 0) for name in self._sizes))
        error = ctypes.create_string_buffer(ERROR_BYTES)
        handle = self._lib.pega_exec_create(
            self._pool.handle, kernels, int(int8), int(bf16), code, len(code) // 8, self._table.ctypes.data,
            greatest, len(self._sizes), error,
        )  # fmt: skip
        if handle is None:
            raise OpError(f"program {self.program.name}: {error.value.decode()}")
        self._handle: int = handle
        if (ranks := self._ranks) is not None:
            self._lib.pega_exec_join(handle, ranks.address, ranks.rank, ranks.ranks, ranks.seconds)
        finalizer = weakref.finalize(self, self._lib.pega_exec_destroy, handle)
        finalizer.atexit = False  # a step may be running when the process ends

    def _keep_flat(self, t: Tensor, memory: Array) -> None:
        self._memory[t] = memory.view(NUMPY[t.dtype])
        self._set(t, _address(self._memory[t]))

    def _set(self, t: Tensor, address: int) -> None:
        self._table[self._place[t]] = address

    def _plain(self, t: Tensor) -> bool:
        return t.storage in self._memory or t.kind is Kind.INPUT

    def _seen(self, t: Tensor, env: Sizes) -> Array:
        return self._given[t.name].reshape(t.sizes(env)) if t.kind is Kind.INPUT else self._view(t, env)

    def _view(self, t: Tensor, env: Sizes) -> Array:
        """A buffer or output in the shape of `env`."""
        shape = t.sizes(env)
        return self._memory[t.storage][: prod(shape)].reshape(shape)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _mapped(nbytes: int) -> Array:
    """Zeroed pages that take memory only where they are touched: [at least nbytes] uint8."""
    return np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
