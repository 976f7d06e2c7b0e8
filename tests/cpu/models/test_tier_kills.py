"""An engine with a disk tier is killed at random instants: each restart reuses what was complete before.

TIER_KILLS sets how often; the child is a fork, so a restart costs no import.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.request import (
    GenerateRequest,
    SamplingParams,
    hash_blocks,
    pack_tokens,
    root_hash,
)
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.engine.restore_cost import RestoreCost
from pegainfer.kv.device.disk_index import ENTRY, DiskIndex
from tests.support.answers import answer
from tests.support.tinymodel import Tiny, write_checkpoint

KILLS = int(os.environ.get("TIER_KILLS", "4"))
PROMPTS, LENGTH, NEW = 10, 96, 4
SEQUENCE = 2 * 2 * 2 * 16 * 4 * (LENGTH + 2 * 16)  # bytes of a sequence: layers, K and V, heads, f32
SCHEDULER = SchedulerConfig(max_slots=2, target_itl_ms=0.0)
START_SECONDS = 120.0


def prompts() -> list[list[int]]:
    r = random.Random(7)
    return [[r.randrange(160) for _ in range(LENGTH)] for _ in range(PROMPTS)]


def request(number: int, prompt: list[int]) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    return GenerateRequest(id=f"r{number}", prompt=pack_tokens(prompt), sampling=sampling)


def engine(model: Path, tier: str) -> InProcessEngine:
    """With a cache of two and a half sequences, so that blocks leave it all the time."""
    config = EngineConfig(
        max_model_len=LENGTH + 16, kv_cache_memory=SEQUENCE * 5 // 2, kv_offload_disk=tier, backend="cpu",
        activation="f32", kv_dtype="f32", threads=1,
    )  # fmt: skip
    built = build_engine(model, "m", config, SCHEDULER)
    return InProcessEngine(built.runner, built.info, SCHEDULER)


def child(model: Path, tier: str, first: int, seed: int, pipe: Connection) -> None:
    """Answers prompt `first`, then others for ever: (prompt, tokens, tokens that came from the disk)."""
    running = engine(model, tier)
    pipe.send(running.stats().tiers[0].cached_blocks)
    r, all_prompts = random.Random(seed), prompts()
    for number in range(10**6):
        which = first if not number else r.randrange(PROMPTS)
        got = answer(running, [request(number, all_prompts[which])], {})[f"r{number}"]
        pipe.send((which, got.tokens[0], running.stats().tiers[0].hit_tokens))


def complete(tier: Path) -> set[bytes]:
    """Keys of the records that the folder of a dead engine says are complete."""
    path = tier / "0.index"
    if not path.exists():
        return set()
    index = DiskIndex(path, path.stat().st_size // ENTRY.itemsize, 0o600)
    try:
        return {key for _, key in index.stored()}
    finally:
        index.close()


@pytest.mark.timeout(120 + 20 * KILLS)
def test_every_restart_reuses_what_was_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestoreCost, "is_worth", lambda self, nbytes, compute_seconds: True)
    model = write_checkpoint(Tiny("m", seed=5, config={"intermediate_size": 128}), tmp_path / "model")
    all_prompts = prompts()
    alone = engine(model, "")
    want = [
        answer(alone, [request(i, prompt)], {})[f"r{i}"].tokens[0] for i, prompt in enumerate(all_prompts)
    ]
    alone.close()
    folder = tmp_path / "tier"
    tier = f"{folder}:{40 * SEQUENCE}"
    context: Any = multiprocessing.get_context("fork")
    r = random.Random(11)
    answers = reused = restarts = 0
    for kill in range(KILLS):
        stored = complete(folder)
        # A prompt whose beginning was complete, if there is one.
        found = [
            i
            for i, prompt in enumerate(all_prompts)
            if hash_blocks(pack_tokens(prompt), 16, parent=root_hash(None, ""))[0] in stored
        ]
        first = r.choice(found) if found else 0
        here, there = context.Pipe()
        process = context.Process(target=child, args=(model, tier, first, kill, there), daemon=True)
        process.start()
        there.close()
        assert here.poll(START_SECONDS)
        assert here.recv() == len(stored)
        # The first answer is waited for, then the engine works on until it is killed.
        left, until = 1 + r.randrange(12), None
        while True:
            if left <= 0 and until is None:
                until = time.monotonic() + r.random() * 0.02
            wait = START_SECONDS if until is None else max(0.0, until - time.monotonic())
            if not here.poll(wait):
                assert until is not None, "the engine has stopped"
                break
            which, tokens, hits = here.recv()
            assert tokens == want[which], f"after {kill} kills, prompt {which}"
            answers += 1
            if found and which == first:
                assert hits > 0, f"after {kill} kills, {len(stored)} blocks: nothing was reused"
                reused += 1
                found = []
            left -= 1
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        here.close()
        restarts += bool(stored)
    print(f"{KILLS} kills, {answers} answers, {restarts} restarts with blocks, {reused} prompts reused them")
    assert restarts >= KILLS - 2 and reused == restarts
