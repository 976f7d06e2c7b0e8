"""Sums over ranks with a GPU each, one after another in a graph: own kernels, and NCCL where it is found.

python bench/cuda_allreduce.py [--ranks 2] [--share-gpu] [--link 450] [--output FILE]

--link: GB/s of a GPU's links in one direction, 450 for NVLink 4. The share is that of 2 (n - 1) / n parts a
GPU, which every all-reduce must send and receive at least.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from pegainfer.cli.machine import commit
from pegainfer.lower.cuda import ranks as lowering
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.measure.cuda.timing import graph_times
from pegainfer.ops.program import Builder
from pegainfer.ops.reduce import REDUCE_RESIDUAL
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
    """A communicator of NCCL, through its C interface."""

    def __init__(self, library: ctypes.CDLL, memory: RankMemory) -> None:
        """`memory`: passes rank 0's id to the others."""
        self._library = library
        own = UniqueId()
        if memory.rank == 0:
            self._check(library.ncclGetUniqueId(ctypes.byref(own)))
        said = memory.exchange(bytes(own) if memory.rank == 0 else b"-")[0]
        self._communicator = ctypes.c_void_p()
        group_id = UniqueId.from_buffer_copy(said)
        self._check(
            library.ncclCommInitRank(
                ctypes.byref(self._communicator), memory.ranks, group_id, ctypes.c_int(memory.rank)
            )
        )

    def sum(self, part: DeviceTensor) -> Work:
        """In place, in float32."""

        def work(stream: Stream) -> None:
            count = part.nbytes // 4
            self._check(
                self._library.ncclAllReduce(
                    ctypes.c_void_p(part.address), ctypes.c_void_p(part.address), ctypes.c_size_t(count),
                    FLOAT, SUM, self._communicator, ctypes.c_void_p(int(stream.handle)),
                )
            )  # fmt: skip

        return work

    def _check(self, code: int) -> None:
        if code:
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            raise SystemExit(f"NCCL: {self._library.ncclGetErrorString(code).decode()}")


def find_nccl() -> ctypes.CDLL | None:
    """The system's library, or that of the package nvidia-nccl-cu13."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not used
    names = ["libnccl.so.2"]
    if (found := find_spec("nvidia.nccl")) is not None and found.submodule_search_locations:
        names.append(str(Path(next(iter(found.submodule_search_locations))) / "lib" / "libnccl.so.2"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def own_sums(ctx: CudaContext, kind: str) -> Callable[[int], list[Work]]:
    """The launches of one sum by a kind of kernel, by bytes."""
    lowering.TAGGED_MOST = SIZES[-1] if kind == "tagged" else 0
    lowering.ONE_SHOT_MOST = SIZES[-1] if kind == "one-shot" else 0
    b = Builder("sums")
    x, partial = b.input("x", "T", WIDTH, dtype="bf16"), b.input("partial", "T", WIDTH, dtype="f32")
    b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    rows = SIZES[-1] // (4 * WIDTH)
    bound = {n: DeviceTensor.empty((rows, WIDTH), d) for n, d in (("x", "bf16"), ("partial", "f32"))}
    for tensor in bound.values():
        ctx.stream.fill(tensor.address, 0, tensor.nbytes)
    executor = CudaBackend(ctx, {}, CudaOptions(tune=False)).prepare(b.build(), {}, {"T": rows}, bound)
    work = {size: executor.work({"T": size // (4 * WIDTH)})[0][1] for size in SIZES}
    return work.__getitem__


def measure(ctx: CudaContext, memory: RankMemory) -> Iterator[dict[str, object]]:
    kinds = {kind: own_sums(ctx, kind) for kind in ("tagged", "one-shot", "two-shot")}
    library = find_nccl()
    if library is not None:
        nccl = Nccl(library, memory)
        kinds["NCCL"] = lambda size: [nccl.sum(DeviceTensor.empty((size // 4,), "f32"))]
    for size in SIZES:
        for kind, make in kinds.items():
            work = make(size) * IN_A_GRAPH
            times = graph_times(ctx, work, REPEATS, f"{kind} {size}")
            ctx.check()
            yield {"bytes": size, "kind": kind, "us": statistics.median(times) / IN_A_GRAPH}


def rank_main(a: argparse.Namespace) -> None:
    memory = RankMemory(a.memory[0], a.rank, a.ranks)
    ctx = CudaContext(0 if a.share_gpu else a.rank, group=memory)
    ctx.connect()
    for row in measure(ctx, RankMemory(a.memory[1], a.rank, a.ranks)):
        if a.rank == 0:
            print(json.dumps(row), flush=True)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--share-gpu", action="store_true")
    p.add_argument("--link", type=float, default=450.0)
    p.add_argument("--output", type=Path, default=Path("bench/results/cuda-allreduce.jsonl"))
    p.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    p.add_argument("--memory", type=int, nargs=2, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.rank is not None:
        rank_main(a)
        return
    memories = [RankMemory.create(a.ranks) for _ in range(2)]
    fds = tuple(m.fd for m in memories)
    command = [sys.executable, __file__, *sys.argv[1:], "--memory", *map(str, fds), "--rank"]
    first, *others = [
        subprocess.Popen([*command, str(rank)], pass_fds=fds, stdout=subprocess.PIPE, text=True)
        for rank in range(a.ranks)
    ]
    assert first.stdout is not None
    head = {"commit": commit(), "ranks": a.ranks, "shared": a.share_gpu}
    a.output.parent.mkdir(parents=True, exist_ok=True)
    with a.output.open("a") as f:
        for line in first.stdout:
            row = json.loads(line)
            sent = 2 * (a.ranks - 1) / a.ranks * row["bytes"]
            row["link_share"] = sent / (row["us"] * 1e-6) / (a.link * 1e9)
            print(f"{row['bytes'] >> 10:6} KB {row['kind']:9} {row['us']:8.2f} µs {row['link_share']:6.1%}")
            f.write(json.dumps(head | row) + "\n")
    codes = [process.wait() for process in (first, *others)]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
