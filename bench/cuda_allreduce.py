"""Sums over ranks with a GPU each, one after another in a graph: own kernels, and NCCL where it is found.

python bench/cuda_allreduce.py [--ranks 2] [--share-gpu] [--link 450] [--output FILE]

--link: GB/s of a GPU's links in one direction, 450 for NVLink 4. The share is that of 2 (n - 1) / n parts a
GPU, which every all-reduce must send and receive at least.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from pegainfer.cli.machine import commit
from pegainfer.lower.cuda import ranks as lowering
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.measure.cuda.timing import graph_times
from pegainfer.ops.program import Builder
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.runtime.cuda.driver import CudaError, errors_at
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.rank_memory import RankMemory

WIDTH = 1024
SIZES = [8 << 10 << i for i in range(11)]  # bytes of a part, 8 KB to 8 MB
IN_A_GRAPH, REPEATS = 20, 30
FLOAT, SUM, ID_BYTES = 7, 0, 128  # of nccl.h


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("bytes", ctypes.c_char * ID_BYTES),)


class Nccl:
    """A communicator of NCCL, through its C interface, and the part that it sums up in place, in float32.

    One part serves all sizes, since NCCL maps what a graph sums up, and unmaps it at a time of its own.
    """

    def __init__(self, library: ctypes.CDLL, ctx: CudaContext, memory: RankMemory) -> None:
        """`memory`: passes rank 0's id to the others. Raises CudaError."""
        library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library = library
        self._part = DeviceTensor.empty((SIZES[-1] // 4,), "f32")
        ctx.stream.fill(self._part.address, 0, self._part.nbytes)
        own = UniqueId()
        if memory.rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(own))
        said = memory.exchange(bytes(own) if memory.rank == 0 else b"-")[0]
        self._communicator = ctypes.c_void_p()
        group_id = UniqueId.from_buffer_copy(said)
        self._call(
            "ncclCommInitRank", ctypes.byref(self._communicator), memory.ranks, group_id, memory.rank
        )  # fmt: skip

    def work(self, size: int) -> list[Work]:
        """The launch of a sum of so many bytes."""

        def launch(stream: Stream) -> None:
            part = ctypes.c_void_p(self._part.address)
            self._call(
                "ncclAllReduce", part, part, ctypes.c_size_t(size // 4), FLOAT, SUM, self._communicator,
                ctypes.c_void_p(int(stream.handle)),
            )  # fmt: skip

        return [launch]

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise CudaError(f"{name} failed", got=self._library.ncclGetErrorString(code).decode())


def find_nccl() -> ctypes.CDLL | None:
    """The system's library, or that of the package nvidia-nccl-cu13."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not used
    names = ["libnccl.so.2"]
    with contextlib.suppress(ModuleNotFoundError):  # no package of NVIDIA's is installed
        if (found := find_spec("nvidia.nccl")) is not None and found.submodule_search_locations:
            names.append(str(Path(next(iter(found.submodule_search_locations))) / "lib" / "libnccl.so.2"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


class OwnSums:
    """Sums by one kind of kernel. The executor holds the memory that the launches point into."""

    def __init__(self, ctx: CudaContext, kind: str) -> None:
        lowering.TAGGED_MOST = SIZES[-1] * ctx.target.ranks if kind == "tagged" else 0
        lowering.ONE_SHOT_MOST = SIZES[-1] * ctx.target.ranks if kind == "one-shot" else 0
        b = Builder("sums")
        x, partial = b.input("x", "T", WIDTH, dtype="bf16"), b.input("partial", "T", WIDTH, dtype="f32")
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
        rows = SIZES[-1] // (4 * WIDTH)
        bound = {n: DeviceTensor.empty((rows, WIDTH), d) for n, d in (("x", "bf16"), ("partial", "f32"))}
        for tensor in bound.values():
            ctx.stream.fill(tensor.address, 0, tensor.nbytes)
        backend = CudaBackend(ctx, {}, CudaOptions(tune=False))
        self._executor: CudaExecutor = backend.prepare(b.build(), {}, {"T": rows}, bound)
        # All sizes are planned now, because the limits above are those of every kind.
        self._work = {size: self._executor.work({"T": size // (4 * WIDTH)})[0][1] for size in SIZES}

    def work(self, size: int) -> list[Work]:
        """The launches of a sum of so many bytes."""
        return self._work[size]


def measure(ctx: CudaContext, memory: RankMemory, shared: bool) -> Iterator[dict[str, object]]:
    """Figures and notes. NCCL comes last, so that the own figures are there where it is missing or fails.

    Args:
        shared: all ranks are on one GPU.
    """
    sums = {kind: OwnSums(ctx, kind) for kind in ("tagged", "one-shot", "two-shot")}
    for size in SIZES:
        for kind, own in sums.items():
            yield timed(ctx, kind, size, own.work(size))
    if shared:
        yield {"note": "NCCL is left out: it refuses ranks that share a GPU"}
    elif (library := find_nccl()) is None:
        yield {"note": "NCCL is left out: libnccl.so.2 was not found; remedy: pip install nvidia-nccl-cu13"}
    else:
        nccl = Nccl(library, ctx, memory)
        for size in SIZES:
            yield timed(ctx, "NCCL", size, nccl.work(size))


def timed(ctx: CudaContext, kind: str, size: int, work: list[Work]) -> dict[str, object]:
    """Raises CudaError where a launch fails, PeerFailedError where another rank does."""
    where = f"{kind} sum of {size >> 10} KB"
    with errors_at(where):
        times = graph_times(ctx, work * IN_A_GRAPH, REPEATS, where)
    ctx.check()
    return {"bytes": size, "kind": kind, "us": statistics.median(times) / IN_A_GRAPH}


def rank_main(a: argparse.Namespace) -> None:
    """Writes rank 0's figures, or why this rank failed, to the pipe: a line of JSON each."""
    first, second, pipe = a.inherited

    def say(what: dict[str, object]) -> None:
        os.write(pipe, json.dumps(what).encode() + b"\n")  # short lines of several ranks do not mix

    try:
        ctx = CudaContext(0 if a.share_gpu else a.rank, group=RankMemory(first, a.rank, a.ranks))
        ctx.connect()
        for row in measure(ctx, RankMemory(second, a.rank, a.ranks), a.share_gpu):
            if a.rank == 0:
                say(row)
    except Exception as error:
        say({"error": f"rank {a.rank}: {type(error).__name__}: {error}"})
        os._exit(1)  # nothing is freed, because a context with a fault may wait for ever


def watch(process: subprocess.Popen[bytes], group: list[subprocess.Popen[bytes]]) -> None:
    """Ends the group when its process fails, because NCCL waits for ever for a rank that is gone."""
    if process.wait():
        for other in group:
            other.kill()


def start(ranks: int) -> tuple[TextIO, list[subprocess.Popen[bytes]]]:
    """The lines that the ranks write, and their processes."""
    lines, pipe = os.pipe()
    memories = [RankMemory.create(ranks) for _ in range(2)]
    fds = (*(memory.fd for memory in memories), pipe)
    command = [sys.executable, __file__, *sys.argv[1:], "--inherited", *map(str, fds), "--rank"]
    group = [subprocess.Popen([*command, str(rank)], pass_fds=fds) for rank in range(ranks)]
    os.close(pipe)
    for process in group:
        threading.Thread(target=watch, args=(process, group), daemon=True).start()
    return os.fdopen(lines), group


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--share-gpu", action="store_true")
    p.add_argument("--link", type=float, default=450.0)
    p.add_argument("--output", type=Path, default=Path("bench/results/cuda-allreduce.jsonl"))
    p.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    p.add_argument("--inherited", type=int, nargs=3, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.rank is not None:
        rank_main(a)
        return
    a.output.parent.mkdir(parents=True, exist_ok=True)
    head = {"commit": commit(), "ranks": a.ranks, "shared": a.share_gpu}
    errors = []
    lines, group = start(a.ranks)
    with lines, a.output.open("a") as f:
        for line in lines:
            row = json.loads(line)
            if "error" in row:
                errors.append(row["error"])
                continue
            if "note" in row:
                print(row["note"])
                continue
            sent = 2 * (a.ranks - 1) / a.ranks * row["bytes"]
            row["link_share"] = sent / (row["us"] * 1e-6) / (a.link * 1e9)
            print(f"{row['bytes'] >> 10:6} KB {row['kind']:9} {row['us']:8.2f} µs {row['link_share']:6.1%}")
            f.write(json.dumps(head | row) + "\n")
    codes = [process.wait() for process in group]
    if any(codes):
        raise SystemExit(errors[0] if errors else f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
