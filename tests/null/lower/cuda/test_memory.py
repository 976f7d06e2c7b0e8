"""Device memory that a lowered step points into lives as long as the step."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Matmul
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.forward import forward, groups
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.launch import Block, Launch
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.cuda.tma import TensorMap
from pegainfer.runtime.rank_memory import RankMemory
from pegainfer.runtime.weights.weight import float32
from tests.null.lower.cuda import test_ranks
from tests.support.fake_cuda import FakeCuda, FakeLt, fake_cuda, fake_kernels

# Hidden and intermediate size, heads, head size. Where matrices are small, each product is cut in its own
# way, so that what one hands to the next has another size each time.
MODELS = [(256, 384, 4, 128), (256, 192, 4, 128), (256, 96, 4, 128), (512, 128, 8, 64), (576, 1536, 9, 64)]
STEPS = [(1, True), (64, True), (8, True), (3, True), (100, False), (30, False), (1, False)]


def executor_of(ctx: CudaContext, sizes: tuple[int, int, int, int], options: CudaOptions) -> CudaExecutor:
    hidden, intermediate, heads, d = sizes
    config = Qwen3Config(
        vocab_size=512, hidden_size=hidden, intermediate_size=intermediate, num_layers=2, num_heads=heads,
        num_kv_heads=1, head_dim=d, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    formats = dict.fromkeys(TABLE.shapes(config), "bf16")
    steps = Formats("bf16", "bf16", "bf16")
    program = forward(config, formats, Sizes(groups(config, 16, steps), (8,), 64), steps)
    table = float32(np.zeros((64, d)))
    backend = CudaBackend(ctx, {"cos_sin": table}, options, Dummy())
    kv = DeviceTensor.empty((8, 2, 2, 1, 16, d), "bf16", "kv")
    executor = backend.prepare(program, {"kv": kv}, {"T": 100, "R": 64, "L": 64})
    backend.load()
    return executor


def words(work: Any) -> list[int]:
    """Every word of a launch's arguments that could be an address."""
    if isinstance(work, Matmul):
        return [work.x, work.w, work.out]
    assert isinstance(work, Launch)
    found = []
    for held in work._held:
        if isinstance(held, TensorMap):
            data = ctypes.string_at(held.address, 8)
        else:
            data = held.data if isinstance(held, Block) else bytes(held)
        found += np.frombuffer(data[: len(data) // 8 * 8], np.uint64).tolist()
    return found


@pytest.mark.parametrize("row_pass", [True, False], ids=["a row as one launch", "a row as launches"])
@pytest.mark.parametrize("sizes", MODELS, ids=str)
def test_no_launch_points_into_memory_that_was_freed(
    sizes: tuple[int, int, int, int], row_pass: bool, tmp_path: Path
) -> None:
    with fake_cuda(FakeCuda(keep_freed=True)) as fake:
        ctx = CudaContext(kernels=fake_kernels(tmp_path))
        ctx.__dict__["lt"] = FakeLt()
        executor = executor_of(ctx, sizes, CudaOptions(row_pass=row_pass))
        for rows, decode in STEPS:
            executor.capture({"T": rows, "R": rows, "L": rows}, decode, graph=False)
        steps = [s for kind in executor._captured._steps.values() for s in kind]
        assert len(steps) == len(STEPS)
        passes = [work for step in steps for work in step.work if "row_pass" in str(work)]
        assert len(passes) == (row_pass and sizes[2] <= 8)  # query heads of the one KV head
        for step in steps:
            for work in step.work:
                stale = [hex(w) for w in words(work) if fake.was_freed(w)]
                assert not stale, f"{step.env}: {work} points to {stale}"


def test_no_launch_of_one_of_two_ranks_points_into_memory_that_was_freed(tmp_path: Path) -> None:
    with fake_cuda(FakeCuda(keep_freed=True)) as fake:
        ctx = CudaContext(kernels=fake_kernels(tmp_path), group=RankMemory.create(2))
        ctx.__dict__["lt"] = FakeLt()
        program = test_ranks.program(2)
        states = {t.name: DeviceTensor.empty(t.sizes({}), t.dtype) for t in program.tensors(Kind.STATE)}
        backend = CudaBackend(ctx, {}, CudaOptions(), Dummy())
        executor = backend.prepare(program, states, {"T": 2112, "R": 64, "L": 64})
        backend.load()
        for rows, decode in [*STEPS, (400, False), (2112, False)]:
            env = {"T": rows, "R": min(rows, 64), "L": min(rows, 64)}
            executor.capture(env, decode, graph=False)
        steps = [s for kind in executor._captured._steps.values() for s in kind]
        kernels = {str(work).split(": ")[1].split()[0] for step in steps for work in step.work}
        sums = {"sum_ranks_norm_bf16", "sum_ranks_one_shot_bf16", "sum_ranks_two_shot_bf16"}
        assert sums <= kernels
        for step in steps:
            for work in step.work:
                stale = [hex(w) for w in words(work) if fake.was_freed(w)]
                assert not stale, f"{step.env}: {work} points to {stale}"
