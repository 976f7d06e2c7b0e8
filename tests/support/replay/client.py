"""Programs on kernels in another process, which may be another processor's under an emulator (replay.cpp)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.kernels.cpu.instructions import OPCODES, declaration_hash
from pegainfer.kernels.cpu.library import ERROR_BYTES, source_hash
from pegainfer.lower.cpu import kv
from pegainfer.lower.cpu.backend import CpuOptions
from pegainfer.lower.cpu.encode import encode, lowered
from pegainfer.lower.cpu.packed import FORMAT_CODES, as_stack
from pegainfer.ops.check import Trial, through_program
from pegainfer.ops.program import Program
from pegainfer.ops.spec import Arrays, Role
from pegainfer.ops.tensor import NUMPY, Kind, Tensor
from pegainfer.runtime.weights.weight import VALUES, Weight

Array = np.ndarray[Any, Any]

SOURCE = Path(__file__).with_name("replay.cpp")
ISA_BYTES = 16
PLAIN = -1  # format of a tensor that is not packed


class Replay:
    """A replaying process. `close` ends it.

    Args:
        command: starts it.

    Raises UnsupportedError where its library was built from other sources than this checkout's.
    """

    def __init__(self, command: Sequence[str | Path]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        self.isa = ""  # the instruction set of the last run
        built = self._read(64).decode()
        if built != source_hash():
            self.close()
            raise UnsupportedError(
                "the replaying library was built from other sources", expected=source_hash()[:12],
                got=built[:12], where=command[-1],
            )  # fmt: skip
        assert self._read(64).decode() == declaration_hash()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        with suppress(BrokenPipeError):  # a request that a dead process never read
            self._to.close()
        self._from.close()
        self._process.wait()

    def run(
        self,
        options: CpuOptions,
        program: Program,
        weights: Mapping[str, Weight],
        states: Arrays,
        inputs: Arrays,
        sizes: Mapping[str, int],
        largest: Mapping[str, int] | None = None,
    ) -> dict[str, Array]:
        """One step; the outputs. `states`, in the kernels' order, are updated in place.

        Raises OpError for whatever the process finds amiss.
        """
        low = lowered(program)
        tensors = low.tensors()
        place = {t: i for i, t in enumerate(tensors)}
        names: list[str] = []
        code = b"".join(
            encode(call, OPCODES.index(call.spec.name), lambda t: place[t.storage], names)
            for call in low.calls
        )
        matrices = {
            call.tensors[o.name].storage
            for call in low.calls
            for o in call.spec.operands
            if o.role is Role.WEIGHT and o.name in call.tensors
        }
        greatest = largest or sizes
        self._to.write((options.isa or "").encode().ljust(ISA_BYTES, b"\0"))
        counts = [len(low.calls), len(code) // 8, len(names), len(tensors)]
        self._send(
            options.threads,
            options.activation == "int8",
            *counts,
            *(greatest[n] for n in names),
            *(sizes[n] for n in names),
        )
        self._to.write(code)
        for t in tensors:
            self._send_tensor(t, t in matrices, weights, {**states, **inputs}, sizes)
        self._to.flush()
        return self._answer(tensors, states, sizes)

    def _send(self, *numbers: int) -> None:
        self._to.write(np.array(numbers, "<i8").tobytes())

    def _send_tensor(
        self,
        t: Tensor,
        matrix: bool,
        weights: Mapping[str, Weight],
        arrays: Arrays,
        sizes: Mapping[str, int],
    ) -> None:
        if t.kind in (Kind.BUFFER, Kind.OUTPUT):
            self._send(PLAIN, 0, 0, 0, t.nbytes(sizes), False, t.kind is Kind.OUTPUT)
            return
        if matrix:
            weight = weights[t.name]
            content = weight.parts[VALUES].bytes().tobytes()
            self._send(FORMAT_CODES[weight.dtype], *as_stack(weight.shape), len(content), True, False)
        else:
            array = weights[t.name].values() if t.kind is Kind.WEIGHT else arrays[t.name]
            assert array.shape == t.sizes(sizes), f"{t}: got {array.shape}"
            content = array.tobytes()
            self._send(PLAIN, 0, 0, 0, len(content), True, t.kind is Kind.STATE)
        self._to.write(content)

    def _answer(
        self, tensors: Sequence[Tensor], states: Arrays, sizes: Mapping[str, int]
    ) -> dict[str, Array]:
        self.isa, fault = (self._read(n).rstrip(b"\0").decode() for n in (ISA_BYTES, ERROR_BYTES))
        if fault:
            listed = " ".join(f"{i}={t.name}" for i, t in enumerate(tensors))
            raise OpError(f"replay on {self.isa or 'nothing'}: {fault}", where=listed)
        outputs: dict[str, Array] = {}
        for t in tensors:
            if t.kind in (Kind.OUTPUT, Kind.STATE):
                array = np.frombuffer(self._read(t.nbytes(sizes)), NUMPY[t.dtype]).reshape(t.sizes(sizes))
                if t.kind is Kind.OUTPUT:
                    outputs[t.name] = array
                else:
                    states[t.name][...] = array
        return outputs

    def _read(self, count: int) -> bytes:
        data = self._from.read(count)
        if len(data) != count:
            raise OpError("the replaying process has died", got=f"exit status {self._process.wait()}")
        return data


def replayer(replay: Replay, options: CpuOptions) -> Callable[[Trial], None]:
    """A `run` for ops.check.check_case."""

    def execute(
        program: Program,
        weights: Mapping[str, Weight],
        states: Arrays,
        inputs: Arrays,
        sizes: Mapping[str, int],
    ) -> dict[str, Array]:
        held = {k: kv.from_reference(a) if k == "kv" else a.copy() for k, a in states.items()}
        largest = {k: n + 3 if k in ("T", "R", "L") else n for k, n in sizes.items()}
        outputs = replay.run(options, program, weights, held, inputs, sizes, largest)
        for k, a in states.items():
            a[...] = kv.to_reference(held[k]) if k == "kv" else held[k]
        return outputs

    return through_program(execute)
