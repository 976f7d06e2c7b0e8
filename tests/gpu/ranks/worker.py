"""One rank on a GPU without a model: `python -m tests.gpu.ranks.worker MEMORY RANK RANKS GPU WAIT MODE SEED`.

MEMORY is the inherited descriptor of the group's memory, WAIT seconds for a rank that does not join a sum.
MODE: `sums` compares sums of random sizes with NumPy's, each rank after delays of its own; `quits` is `sums`
in which the last rank ends in the middle; `waits` is one sum that the last rank never joins. Ranks print what
went wrong.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from pegainfer.lower.cuda import ranks as lowering
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Binder, Memory
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.lowering import LoweringContext, Step
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.plan import Place, StepPlan
from pegainfer.lower.cuda.ranks import gather, shard_of
from pegainfer.lower.cuda.store import WeightStore
from pegainfer.ops.check import Trial, check_case, suitable_cases
from pegainfer.ops.fused_norm import REDUCE_RESIDUAL_NORM
from pegainfer.ops.program import Builder, OpCall
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.sample import SAMPLE, SAMPLE_TOKENS
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.cuda.tensor import DeviceTensor, encode
from pegainfer.runtime.rank_memory import RankMemory
from tests.gpu.harness import raw, rounded, runner, sized, write
from tests.gpu.kernels.test_sampling import check_step, of_rank

Array = np.ndarray[Any, Any]
WIDTH = 1024
# Rows whose sums take one launch and several, by each kind of kernel.
ROWS = sized((1, 3, 17, 32, 33, 127, 130, 256, 700, 2051, 4097), (1, 3, 33, 130))
# TAGGED_MOST and ONE_SHOT_MOST, with which all sums are of one kind; None: as they are.
LIMITS: dict[str, tuple[int, int] | None] = {
    "chosen": None, "tagged": (1 << 40, 0), "one_shot": (0, 1 << 40), "two_shot": (0, 0),
}  # fmt: skip
ROUNDS = sized(120, 12)
REPLAYS = 50
WIDE, PART, ROOM = 2560, 1024, 64  # of sums with a norm: columns, those of a part, and most rows
MATRICES = ((1, 1000), (1, 36), (3, 4100), (40, 50_000))


class Sums:
    """x += the sum over ranks of partial, by the program that a model's layers run.

    `kind`: a key of LIMITS.
    """

    def __init__(self, ctx: CudaContext, dtype: str, kind: str = "chosen") -> None:
        self._ctx, self._dtype, self._limits = ctx, dtype, LIMITS[kind]
        self._x = DeviceTensor.empty((max(ROWS), WIDTH), dtype)
        self._partial = DeviceTensor.empty((max(ROWS), WIDTH), "f32")
        b = Builder("sums")
        x, partial = b.input("x", "T", WIDTH, dtype=dtype), b.input("partial", "T", WIDTH, dtype="f32")
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
        bound = {"x": self._x, "partial": self._partial}
        backend = CudaBackend(ctx, {}, CudaOptions(tune=False))
        self.executor: CudaExecutor = backend.prepare(b.build(), {}, {"T": max(ROWS)}, bound)

    def run(self, rows: int) -> None:
        """A sum whose kernel is planned with the limits of its kind."""
        before = lowering.TAGGED_MOST, lowering.ONE_SHOT_MOST
        lowering.TAGGED_MOST, lowering.ONE_SHOT_MOST = self._limits or before
        self.executor.run({}, {"T": rows})
        lowering.TAGGED_MOST, lowering.ONE_SHOT_MOST = before

    def fill(self, x: Array, partial: Array) -> None:
        rows = len(x)
        write(self._ctx, DeviceTensor.at(self._x.address, (rows, WIDTH), self._dtype), x)
        write(self._ctx, DeviceTensor.at(self._partial.address, (rows, WIDTH), "f32"), partial)

    def x(self, rows: int) -> Array:
        return DeviceTensor.at(self._x.address, (rows, WIDTH), self._dtype).numpy(self._ctx.stream)


def delay(ctx: CudaContext, rng: np.random.Generator) -> None:
    """Of the host, of the device, or none."""
    kind = rng.integers(0, 3)
    if kind == 1:
        time.sleep(rng.uniform(0, 0.01))
    elif kind == 2:
        for _ in range(int(rng.integers(1, 20))):
            ctx.stream.fill(ctx.flush.address, 0, ctx.flush.nbytes)


def expected(x: Array, parts: list[Array], dtype: str) -> Array:
    """In float32, in the order of the ranks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return stored(x + total, dtype)


def stored(values: Array, dtype: str) -> Array:
    """Values that the dtype holds exactly, in float32."""
    return values if dtype == "f32" else rounded(values, dtype)


def check_sums(ctx: CudaContext, memory: RankMemory, seed: int, quits: bool) -> None:
    common, own = np.random.default_rng(seed), np.random.default_rng([seed, memory.rank])
    sums = {(dtype, kind): Sums(ctx, dtype, kind) for dtype in ("bf16", "f16", "f32") for kind in LIMITS}
    for number in range(ROUNDS):
        if quits and memory.rank == memory.ranks - 1 and number == ROUNDS // 2:
            os._exit(0)
        rows, chosen = int(common.choice(ROWS)), list(sums)[common.integers(len(sums))]
        dtype, kind = chosen
        x = stored(common.standard_normal((rows, WIDTH), np.float32), dtype)
        parts = [
            common.standard_normal((rows, WIDTH), np.float32) * np.float32(10.0 ** common.integers(-3, 3))
            for _ in range(memory.ranks)
        ]
        s = sums[chosen]
        s.fill(x, parts[memory.rank])
        delay(ctx, own)
        s.run(rows)
        got = s.x(rows)
        ctx.check()
        want = expected(x, parts, dtype)
        if not np.array_equal(encode(got, dtype), encode(want, dtype)):
            raise AssertionError(
                f"round {number}, {rows} rows of {dtype}, {kind}: {np.abs(got - want).max()} off, "
                f"{(got != want).sum()} values"
            )


def check_graphs(ctx: CudaContext, memory: RankMemory, seed: int) -> None:
    """Replays of one graph; each rank makes it when it likes, without the others."""
    own = np.random.default_rng([seed, memory.rank])
    for rows in (ROWS[0], *ROWS[-3:]):
        sums = Sums(ctx, "f32")
        delay(ctx, own)
        sums.executor.capture({"T": rows}, False)
        sums.fill(np.zeros((rows, WIDTH), np.float32), np.full((rows, WIDTH), 1 + memory.rank, np.float32))
        for _ in range(REPLAYS):
            delay(ctx, own) if own.random() < 0.1 else None
            sums.executor.replay({"T": rows}, False)
        want = REPLAYS * sum(range(1, memory.ranks + 1))
        got = sums.x(rows)
        ctx.check()
        assert np.all(got == want), f"{rows} rows: {got.min()} to {got.max()} in place of {want}"


def check_norm(ctx: CudaContext, memory: RankMemory, seed: int) -> None:
    """The sum, and the beginning of the norm behind it."""
    common, own = np.random.default_rng(seed), np.random.default_rng([seed, memory.rank])
    norm = 1 + common.standard_normal(WIDE, np.float32) / 8
    x, partial = DeviceTensor.empty((ROOM, WIDE), "bf16"), DeviceTensor.empty((ROOM, WIDE), "f32")
    b = Builder("sums and norms")
    tensors = {
        "x": b.input("x", "T", WIDE, dtype="bf16"),
        "partial": b.input("partial", "T", WIDE, dtype="f32"),
        "norm": b.weight("norm", WIDE, dtype="f32"),
        "normed": b.output("normed", "T", WIDE, dtype="bf16"),
        "squares": b.output("squares", -(-WIDE // PART), ROOM, dtype="f32"),
    }
    b.emit(REDUCE_RESIDUAL_NORM, {"part": PART}, **tensors)
    backend = CudaBackend(ctx, {"norm": raw(norm, "f32")}, CudaOptions(tune=False))
    executor = backend.prepare(b.build(), {}, {"T": ROOM}, {"x": x, "partial": partial})
    backend.load()
    for rows in (1, 2, 12, 63, ROOM):
        before = stored(common.standard_normal((rows, WIDE), np.float32), "bf16")
        parts = [common.standard_normal((rows, WIDE), np.float32) for _ in range(memory.ranks)]
        write(ctx, DeviceTensor.at(x.address, (rows, WIDE), "bf16"), before)
        write(ctx, DeviceTensor.at(partial.address, (rows, WIDE), "f32"), parts[memory.rank])
        delay(ctx, own)
        outputs = executor.run({}, {"T": rows})
        got = DeviceTensor.at(x.address, (rows, WIDE), "bf16").numpy(ctx.stream)
        normed, squares = (outputs[name].numpy(ctx.stream) for name in ("normed", "squares"))
        ctx.check()
        want = expected(before, parts, "bf16")
        assert np.array_equal(got, want), f"{rows} rows: {np.abs(got - want).max()} off"
        assert np.array_equal(normed, stored(want * norm, "bf16")), f"norm of {rows} rows"
        padded = np.pad(want, ((0, 0), (0, len(squares) * PART - WIDE))).reshape(rows, len(squares), PART)
        sums = (padded.astype(np.float64) ** 2).sum(axis=2).T
        assert np.allclose(squares[:, :rows], sums, rtol=1e-5), f"squares of {rows} rows"


def check_gather(ctx: CudaContext, memory: RankMemory, seed: int) -> None:
    """Columns that do not divide, a last rank with few, rows of several launches."""
    common, own = np.random.default_rng(seed), np.random.default_rng([seed, memory.rank])
    for rows, columns in MATRICES:
        whole = common.standard_normal((rows, columns), np.float32)
        mine = shard_of(columns, ctx.target)
        assert mine is not None
        part = DeviceTensor.from_numpy(
            np.ascontiguousarray(whole[:, mine.start : mine.stop]), "f32", ctx.stream
        )
        out = DeviceTensor.empty((rows, columns), "f32")
        ctx.stream.fill(out.address, 0xFF, out.nbytes)
        lens = common.integers(-1, 2, rows).astype(np.int32)
        wanted = DeviceTensor.from_numpy(lens, "i32", ctx.stream)
        held = {"out": out, "part": part, "wanted": wanted}
        tensors = [Tensor(name, t.shape, t.dtype, Kind.BUFFER) for name, t in held.items()]
        addresses = dict(zip(tensors, (t.address for t in held.values()), strict=True))
        call = OpCall.of(REDUCE_RESIDUAL, {}, x=tensors[0], partial=tensors[0])  # for labels alone
        plan = StepPlan({}, False)
        context = LoweringContext(call, Step(ctx.target, {}, False), plan)
        *both, asked = map(Place, tensors)
        gather(context, *both, rows, columns, asked)
        memory_of = Memory(addresses.__getitem__, 0, lambda name: 0)
        for work in Binder(ctx, WeightStore(ctx, {}), memory_of, tune=False).bind(list(plan.launches)):
            delay(ctx, own)
            work(ctx.stream)
        got = out.numpy(ctx.stream)
        ctx.check()
        faults = (got != whole)[lens >= 0].sum()
        assert not faults, f"{rows} x {columns}: {faults} values differ"


def check_sampler(ctx: CudaContext, seed: int) -> None:
    """Small cases of every kind, and a vocabulary of true size."""
    run = runner(ctx)
    for spec in (SAMPLE_TOKENS, SAMPLE):
        name = "scores" if spec is SAMPLE_TOKENS else "logits"

        def of_one_rank(trial: Trial, name: str = name) -> None:
            run(replace(trial, arrays={**trial.arrays, name: of_rank(trial.arrays[name], ctx)}))

        for case in suitable_cases(spec, seed):
            report = check_case(spec, case, of_one_rank)
            ctx.check()
            assert not report.faults, f"{spec.name} {report.label}: {report.faults}"
    for number in range(sized(3, 1)):
        check_step(seed + number, ctx)
        ctx.check()


def main() -> None:
    fd, rank, ranks, ordinal = map(int, sys.argv[1:5])
    wait, mode, seed = float(sys.argv[5]), sys.argv[6], int(sys.argv[7])
    memory = RankMemory(fd, rank, ranks, wait)
    ctx = CudaContext(ordinal, group=memory)
    ctx.connect()
    if mode == "waits":
        if rank == ranks - 1:
            for _ in itertools.count():
                time.sleep(1)
        sums = Sums(ctx, "f32")
        sums.fill(*np.zeros((2, 1, WIDTH), np.float32))
        sums.executor.run({}, {"T": 1})
        print("waiting", flush=True)
        ctx.stream.synchronize("sum")
        ctx.check()
        raise AssertionError("the sum has ended without the last rank")
    check_sums(ctx, memory, seed, mode == "quits")
    check_graphs(ctx, memory, seed)
    check_gather(ctx, memory, seed)
    check_norm(ctx, memory, seed)
    check_sampler(ctx, seed)
    print("right")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)
