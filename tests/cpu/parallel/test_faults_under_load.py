"""Ranks that are killed or stopped while requests run: every request ends, and nothing is left behind.

PEGAINFER_RANK_KILLS and PEGAINFER_RANK_HANGS say how many.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from pegainfer.app import ranks as app_ranks
from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.parallel.group import RankGroup
from pegainfer.parallel.process import END_SECONDS, RankProcess
from tests.support.tinymodel import MODELS, write_checkpoint
from tests.support.tinyqwen3moe import TinyQwen3Moe

KILLS = int(os.environ.get("PEGAINFER_RANK_KILLS", "3"))
HANGS = int(os.environ.get("PEGAINFER_RANK_HANGS", "1"))
WAIT = 1.0  # seconds that ranks wait for each other
REQUESTS = 12


def left_behind() -> tuple[int, list[str]]:
    """Open descriptors of this process, and what lies in the folder of shared memory."""
    gc.collect()  # what earlier tests left to it is not counted
    return len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))


@pytest.mark.timeout(60 + 20 * (KILLS + HANGS))  # each starts up to four processes
@pytest.mark.parametrize(
    ("number", "times", "within"),
    [(signal.SIGKILL, KILLS, 5.0), (signal.SIGSTOP, HANGS, WAIT + END_SECONDS + 5.0)],
    ids=["kills", "hangs"],
)
def test_every_request_ends(
    number: int, times: int, within: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_ranks, "WAIT_SECONDS", WAIT)
    dense = write_checkpoint(MODELS["tied_f32"], tmp_path / "dense")
    experts = write_checkpoint(TinyQwen3Moe("m", seed=4), tmp_path / "experts")
    kinds = [(dense, 2, False), (dense, 4, False), (experts, 2, True)]
    rng = random.Random(5)
    took = []
    before = left_behind()
    for i in range(times):
        took.append(_engine(*kinds[i % len(kinds)], number, rng))
        descriptors, shared = left_behind()
        assert descriptors <= before[0] and set(shared) <= set(before[1])
    print(f"{times} faults; the last request ended after {max(took):.2f} s at most")
    assert max(took) < within


def _engine(folder: Path, size: int, whole: bool, number: int, rng: random.Random) -> float:
    """An engine with a fault; seconds until the last request has ended. `whole`: ranks have whole experts."""
    scheduler = SchedulerConfig(max_slots=8)
    config = EngineConfig(tensor_parallel_size=size, threads=1, enable_expert_parallel=whole)
    built = build_engine(folder, "m", config, scheduler)
    assert isinstance(built.runner, RankGroup)
    ranks = [rank for rank in built.runner.ranks if isinstance(rank, RankProcess)]
    engine = InProcessEngine(built.runner, built.info, scheduler)
    try:
        seconds = _fault(engine, rng.choice(ranks), number, rng.random() * 0.2)
    finally:
        engine.close()
    assert all(rank.process.poll() is not None for rank in ranks), "a process is left"
    return seconds


def _fault(engine: InProcessEngine, victim: RankProcess, number: int, delay: float) -> float:
    """Seconds from the signal to the end of the last request."""
    done = threading.Semaphore(0)
    running = threading.Event()
    ends: dict[str, TokenEvent] = {}

    def sink(event: TokenEvent) -> None:
        running.set()
        if event.finish is not None:
            ends[event.request_id] = event
            done.release()

    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for i in range(REQUESTS):
        prompt = pack_tokens([1 + i, 2, 3])
        engine.submit(GenerateRequest(id=f"r{i}", prompt=prompt, sampling=sampling), sink)
    assert running.wait(30)
    time.sleep(delay)
    victim.process.send_signal(number)
    began = time.monotonic()
    for _ in range(REQUESTS):
        assert done.acquire(timeout=60), "a request has not ended"
    seconds = time.monotonic() - began
    failed = [event for event in ends.values() if event.finish is FinishReason.ERROR]
    assert failed, "the fault came too late"
    rank = victim.rank
    assert all(f"rank {rank} " in str(event.error) for event in failed), failed[0].error
    return seconds
