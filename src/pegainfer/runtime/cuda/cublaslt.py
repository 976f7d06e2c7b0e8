"""Matrix products by cuBLASLt, called through ctypes.

nvmath's bindings would do, but importing them loads all of nvmath (0.29 s, 61 MB), and calls are captured in
graphs, where their host cost does not matter.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pegainfer.runtime.cuda.driver import CudaError
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.stream import Event, Stream

LIBRARY = "libcublasLt.so.13"
WORKSPACE = 32 << 20  # bytes; what NVIDIA advises for Hopper
CANDIDATES = 8  # algorithms tried; the best of 8 is 5 to 13 % quicker than the first

# Values of cublasLt.h and library_types.h, 13.x.
_COMPUTE_32F = 68
_TYPES = {"f32": 0, "f16": 2, "bf16": 14}
_DESC_TRANSA, _PREF_WORKSPACE = 3, 1
_OP_T = 1


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises CudaError where it is not installed."""
    places = [LIBRARY]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        places.insert(0, str(Path(folder) / "cu13" / "lib" / LIBRARY))
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise CudaError(
        f"{LIBRARY} is not installed", expected=" or ".join(places), remedy="pip install 'pegainfer[cuda]'"
    )


def _call(name: str, *args: Any, where: object = None) -> None:
    status = getattr(library(), name)(*args)
    if status:
        raise CudaError(f"{name} failed", code=str(status), got=f"cublas status {status}", where=where)


@dataclass(frozen=True)
class MatmulProblem:
    """out[m, n] = x[m, k] · w[n, k]ᵀ, all row-major; with `accumulate`, added to what out holds.

    `alike`: GPUs of one type must get the same bits, so the algorithm is not picked by timing.
    """

    m: int
    n: int
    k: int
    dtype: str  # of x and w
    out_dtype: str
    accumulate: bool = False
    alike: bool = False

    def __str__(self) -> str:
        into = "+=" if self.accumulate else "="
        return f"out[{self.m}, {self.n}] {self.out_dtype} {into} x · w[{self.n}, {self.k}]ᵀ {self.dtype}"


class CublasLt:
    """The library's handle and the one workspace of a stream."""

    def __init__(self, workspace: int = WORKSPACE) -> None:
        """`workspace`: bytes of it."""
        self.handle = ctypes.c_void_p()
        _call("cublasLtCreate", ctypes.byref(self.handle))
        self.workspace = DeviceBuffer(workspace, "cuBLASLt workspace")
        self._plans: dict[MatmulProblem, MatmulPlan] = {}

    def plan(self, problem: MatmulProblem) -> MatmulPlan:
        """Descriptors and algorithm of a problem; kept, so that each is looked up once."""
        if problem not in self._plans:
            self._plans[problem] = MatmulPlan(self, problem)
        return self._plans[problem]

    def close(self) -> None:
        _call("cublasLtDestroy", self.handle)
        self.workspace.free()


def warm_up() -> None:
    """Loads the library and asks it for one algorithm: 0.2 s the first time in a process, next to none later.

    Takes no device memory. Raises CudaError.
    """
    lt = CublasLt(workspace=0)
    lt.plan(MatmulProblem(256, 256, 256, "bf16", "bf16"))
    lt.close()


class MatmulPlan:
    """cuBLASLt is column-major: outᵀ[n, m] = (w as [k, n])ᵀ · (x as [k, m])."""

    def __init__(self, lt: CublasLt, problem: MatmulProblem) -> None:
        """Raises CudaError where the library has no algorithm for it."""
        p = problem
        self.problem = p
        self._lt = lt
        self._desc, preference = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self._desc), _COMPUTE_32F, _TYPES["f32"], where=p)
        op = ctypes.c_int(_OP_T)
        _call("cublasLtMatmulDescSetAttribute", self._desc, _DESC_TRANSA, ctypes.byref(op), ctypes.sizeof(op))
        self._w = _layout(p.dtype, p.k, p.n)
        self._x = _layout(p.dtype, p.k, p.m)
        self._out = _layout(p.out_dtype, p.n, p.m)
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_size_t(WORKSPACE)
        _call(
            "cublasLtMatmulPreferenceSetAttribute", preference, _PREF_WORKSPACE, ctypes.byref(size),
            ctypes.sizeof(size),
        )  # fmt: skip
        self._found = (_Result * CANDIDATES)()
        count = ctypes.c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic", lt.handle, self._desc, self._w, self._x, self._out, self._out,
            preference, CANDIDATES, self._found, ctypes.byref(count), where=p,
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        self.candidates = count.value
        if not self.candidates:
            raise CudaError("cuBLASLt has no algorithm", where=p)
        self.chosen = 0
        self.tuned = False
        self._alpha, self._beta = ctypes.c_float(1), ctypes.c_float(1 if p.accumulate else 0)

    def tune(self, x: int, w: int, out: int, stream: Stream, flush: DeviceBuffer) -> None:
        """Times every candidate with cold caches, once, and keeps the quickest. Overwrites out.

        Args:
            flush: written before each run; at least as large as the L2 cache.
        """
        if self.tuned or self.problem.alike:
            return
        best = float("inf")
        for i in range(self.candidates):
            times = []
            for _ in range(3):
                stream.fill(flush.address, 0, flush.nbytes)
                start, stop = Event(timing=True), Event(timing=True)
                start.record(stream)
                self.run(x, w, out, stream, i)
                stop.record(stream)
                stop.wait(self.problem)
                times.append(stop.milliseconds_since(start))
            if sorted(times)[1] < best:
                best, self.chosen = sorted(times)[1], i
        self.tuned = True

    def run(self, x: int, w: int, out: int, stream: Stream, candidate: int | None = None) -> None:
        """Puts the product on the stream. Arguments are device addresses."""
        algo = self._found[self.chosen if candidate is None else candidate].algo
        _call(
            "cublasLtMatmul", self._lt.handle, self._desc, ctypes.byref(self._alpha),
            ctypes.c_void_p(w), self._w, ctypes.c_void_p(x), self._x, ctypes.byref(self._beta),
            ctypes.c_void_p(out), self._out, ctypes.c_void_p(out), self._out,
            ctypes.byref(algo), ctypes.c_void_p(self._lt.workspace.address), ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(int(stream.handle)), where=self.problem,
        )  # fmt: skip

    def __str__(self) -> str:
        how = "timed" if self.tuned else "the heuristic's first"
        return f"{self.problem}: cublasLt, algorithm {self.chosen} of {self.candidates} ({how})"


def _layout(dtype: str, rows: int, columns: int) -> ctypes.c_void_p:
    """Column-major, without padding."""
    out = ctypes.c_void_p()
    size = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(out), _TYPES[dtype], *size)
    return out
