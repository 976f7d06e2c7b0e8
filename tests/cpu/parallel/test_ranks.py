"""Tensor-parallel ranks on the CPU: one rank's answers, the same bits in every run, an end when one fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app import ranks as app_ranks
from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.errors import ConfigError, EngineDeadError, OpError
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, SlotBlocks, StepPlan, StepResult
from pegainfer.engine.config import SchedulerConfig
from pegainfer.parallel.group import RankGroup
from pegainfer.parallel.process import RankProcess
from tests.support import tinymodel, tinyqwen3
from tests.support.hybrid_traffic import LENGTH, run
from tests.support.tinymodel import Tiny, token_ids, write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3
from tests.support.tinyrun import compare, forced

DATA = Path(__file__).parents[2] / "data"
LLAMA, QWEN3 = (np.load(DATA / line / "tiny.npz") for line in ("llama", "qwen3"))
MEAN, MAX = 1e-3, 1e-2  # nat, the lines' bounds for float32 against float32
STEPS = int(os.environ.get("PEGAINFER_RANK_STEPS", "300"))
TIE = 1e-4  # nat; the largest difference of logits that was seen is 2e-5
# Quantised matrices whose blocks of 32 columns divide among two ranks.
WIDE = {"intermediate_size": 128, "max_position_embeddings": 512}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("model", "golden"),
    [
        (tinymodel.MODELS["untied_bf16_shards"], LLAMA),
        (tinymodel.MODELS["linear_mha_f32"], LLAMA),
        (tinyqwen3.MODELS["tied_bf16"], QWEN3),
        (tinyqwen3.MODELS["yarn_f16"], QWEN3),
    ],
    ids=lambda v: v.name if isinstance(v, Tiny) else "",
)
def test_ranks_keep_the_bounds_of_their_line(model: Tiny, golden: Any, ranks: int, tmp_path: Path) -> None:
    """Four ranks have a KV head each, which two of them share where the model has two."""
    folder = write_checkpoint(model, tmp_path)
    found = compare(
        folder, token_ids(model), golden, model.name, "cpu", None, tensor_parallel_size=ranks, threads=1
    )
    assert found.greedy == found.wanted
    assert found.errors.mean() <= MEAN
    assert found.errors.max() <= MAX


@pytest.mark.parametrize("line", ["llama", "qwen3"])
def test_quantised_files_divide_between_blocks(line: str, tmp_path: Path) -> None:
    """A GGUF file whose rows of q and k are in an order of their own (llama), with 8-bit activations."""
    path = tmp_path / "m.gguf"
    model: Tiny
    if line == "llama":
        model = Tiny("m", seed=9, config=WIDE)
        tinymodel.write_gguf(model, path, tinymodel.by_role("q8_0", "q8_0", "q4_1"))
    else:
        model = TinyQwen3("m", seed=9, config=WIDE)
        tinyqwen3.write_gguf(model, path, tinymodel.by_role("q8_0", "q8_0", "q4_1"))
    ids = token_ids(model)
    one, two = (
        forced(path, ids, "m", 8, backend="cpu", activation="int8", tensor_parallel_size=ranks, threads=1)
        for ranks in (1, 2)
    )
    assert one[1] == two[1]
    # Rounding to 8 bits is the same in both; what differs is the order of float32 sums, and what that moves
    # over the edge between two 8-bit values.
    errors = [abs(a.logprob - b.logprob) for a, b in zip(one[0], two[0], strict=True)]
    assert np.mean(errors) <= 1e-2


def test_every_run_gives_the_same_bits(tmp_path: Path) -> None:
    model = tinymodel.MODELS["tied_f32"]
    folder = write_checkpoint(model, tmp_path)
    runs = [
        forced(folder, token_ids(model), "m", 12, backend="cpu", tensor_parallel_size=2, threads=threads)
        for threads in (1, 1, 2)
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "model", [Tiny("m", seed=5, config=WIDE), TinyQwen3("m", seed=6, config=WIDE)], ids=["llama", "qwen3"]
)
def test_random_traffic_gives_the_tokens_of_one_rank(model: Tiny, ranks: int, tmp_path: Path) -> None:
    """Preemption, prefix hits, chunks and cancels; tokens may part at near ties alone."""
    folder = write_checkpoint(model, tmp_path)
    # Pages of two and a half sequences; four ranks keep each KV head twice.
    token = 2 * 2 * 2 * model.hf_config().get("head_dim", 16) * 4 * max(1, ranks // 2)  # bytes
    seen = run(
        folder, STEPS, tie=TIE, alone={"tensor_parallel_size": 1}, backend="cpu", activation="f32",
        threads=1, tensor_parallel_size=ranks, kv_cache_memory=token * LENGTH * 5 // 2,
    )  # fmt: skip
    assert seen["differences"] == 0
    for name in ("preemptions", "prefix tokens hit", "chunks", "following rows", "repeated steps"):
        assert seen[name] > 0, f"no {name}"


# What does not fit


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        (3, ConfigError, "a divisor of 4 query heads and of 96 feed-forward units.*got 3"),
        (2, OpError, "slice of axis 1 of a q8_0 weight .*expected multiples of 32"),
    ],
)
def test_models_that_do_not_divide_are_refused(
    ranks: int, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = tinymodel.write_gguf(
        Tiny("m", seed=1), tmp_path / "m.gguf", tinymodel.by_role("q8_0", "q8_0", "q8_0")
    )
    config = EngineConfig(tensor_parallel_size=ranks)
    with pytest.raises(error, match=message):
        build_engine(path, "m", config, SchedulerConfig())


# Faults


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """Three ranks that wait a second for each other."""
    monkeypatch.setattr(app_ranks, "WAIT_SECONDS", 1.0)
    model = Tiny("m", seed=3, config={"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16})
    config = EngineConfig(tensor_parallel_size=3, threads=1)
    runner = build_engine(write_checkpoint(model, tmp_path), "m", config, SchedulerConfig(max_slots=2)).runner
    assert isinstance(runner, RankGroup)
    processes = others(runner)
    try:
        yield runner
    finally:
        runner.close()
    assert all(rank.process.poll() is not None for rank in processes), "a process is left"


def others(group: RankGroup) -> list[RankProcess]:
    return [rank for rank in group.ranks if isinstance(rank, RankProcess)]


def steps(group: RankGroup, count: int) -> list[StepResult]:
    """So many steps of a new sequence and one without rows, two plans in flight."""
    tokens = pack_tokens([1, 2, 3])
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    new = NewSlot(slot=0, seq=0, tokens=tokens, num_prompt=3, sampling=params, seed=0)
    plans = [
        StepPlan(
            step=1, news=(new,), blocks=(SlotBlocks(0, 0, tuple(range(8))),), rows=(Row(0, 0, 3, True),)
        ),
        *(StepPlan(step=2 + i, rows=(Row(0, 3 + i, 1, True, follow=True),)) for i in range(count - 1)),
        StepPlan(step=1 + count, frees=(0,)),
    ]
    results, pending = [], []
    for plan in plans:
        pending.append(group.sample(group.forward(plan)))
        if len(pending) == 2:
            results.append(pending.pop(0).wait())
    return [*results, *(step.wait() for step in pending)]


def test_a_killed_rank_ends_the_engine_and_is_named(group: RankGroup) -> None:
    assert len(steps(group, 20)) == 21
    victim = others(group)[1]
    victim.process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 2 has ended; got SIGKILL; at process \d+"):
        steps(group, 100)
    with pytest.raises(EngineDeadError):  # and stays so
        steps(group, 1)
    assert time.monotonic() - began < 5.0


def test_a_rank_killed_during_steps(group: RankGroup) -> None:
    victim = others(group)[0]
    pid = victim.process.pid
    with pytest.raises(EngineDeadError, match="rank 1 has ended; got SIGKILL"):
        for i in range(1000):
            if i == 3:
                os.kill(pid, signal.SIGKILL)
            steps(group, 10)


def test_a_rank_that_hangs_ends_the_engine_and_is_named(group: RankGroup) -> None:
    steps(group, 2)
    victim = others(group)[0]
    victim.process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"rank 1 (of 3 )?does not answer"):
        steps(group, 2)
    assert victim.process.poll() == -signal.SIGKILL


def test_a_rank_that_fails_alone_ends_the_engine(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no arrays")

    monkeypatch.setattr(group.ranks[0], "_forward", fails)
    with pytest.raises(EngineDeadError, match="rank 0 failed where others did not: MemoryError: no arrays"):
        steps(group, 2)


def test_a_rank_that_cannot_start_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tinymodel.MODELS["tied_f32"], tmp_path)
    monkeypatch.setenv("PEGAINFER_ISA", "none")
    with pytest.raises(ConfigError, match=r"no kernels for this instruction set; expected .*; got none"):
        build_engine(folder, "m", EngineConfig(tensor_parallel_size=2), SchedulerConfig())
    monkeypatch.delenv("PEGAINFER_ISA")
    # Rank 0 is ready, the other one is not.
    start = "import os, sys; os.environ['PEGAINFER_ISA'] = 'none'; "
    start += "from pegainfer.app.rank_process import main; main(sys.argv[1:])"
    monkeypatch.setattr(app_ranks, "COMMAND", (sys.executable, "-c", start))
    with pytest.raises(ConfigError, match=r"no kernels for this instruction set; expected .*; got none"):
        build_engine(folder, "m", EngineConfig(tensor_parallel_size=2), SchedulerConfig())
