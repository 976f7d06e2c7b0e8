"""What share of the read bandwidth decoding one sequence on the CPU reaches, with dummy weights.

    python bench/dummy_model.py Qwen3.5-0.8B /dev/shm/m
    python bench/decode_share.py /dev/shm/m [--seconds 25]

Four steps and four sweeps over as many bytes as a step moves take turns, so that others who use the machine
meanwhile slow both. Prints the best and the median of each in ms, and the share: time of a sweep over that of
a step. CPU time is that of all threads over their number, which waiting for a processor does not lengthen.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.cli.machine import commit, cpu_model, num_cores
from pegainfer.cli.plan import step_programs
from pegainfer.cli.spec import EngineSpec
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, Runner, SlotBlocks, StateGroup, StepPlan
from pegainfer.engine.config import SchedulerConfig

PROMPT = [5, 6, 7, 8]
TURNS = 4
MOST_TOKENS = 500
BLOCKS = 32  # of 16 tokens


def decoder(runner: Runner) -> Callable[[], None]:
    """A call that decodes the next token of a sequence."""
    steps, places = itertools.count(2), itertools.count(len(PROMPT))
    new = NewSlot(
        slot=1, seq=1, tokens=pack_tokens(PROMPT), num_prompt=len(PROMPT),
        sampling=SamplingParams(temperature=0.0), seed=0,
    )  # fmt: skip
    blocks = tuple(
        SlotBlocks(1, g, (1,) if isinstance(group, StateGroup) else tuple(range(BLOCKS)))
        for g, group in enumerate(runner.info.kv.groups)
    )
    first = StepPlan(step=1, news=(new,), blocks=blocks, rows=(Row(1, 0, len(PROMPT), True),))
    runner.sample(runner.forward(first)).wait()

    def decode() -> None:
        plan = StepPlan(step=next(steps), rows=(Row(1, next(places), 1, True),))
        runner.sample(runner.forward(plan)).wait()

    return decode


def sweeper(nbytes: int, threads: int) -> Callable[[], None]:
    """A call that reads so many bytes of memory on so many threads."""
    parts = np.array_split(np.ones(nbytes // 8, np.uint64), threads)

    def sweep() -> None:
        workers = [threading.Thread(target=part.max) for part in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return sweep


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds: by the clock, and of this process on all processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=25.0)
    args = parser.parse_args()
    config = EngineConfig(kv_cache_memory=1 << 26, load_format="dummy")
    scheduler = SchedulerConfig(max_slots=2, max_prefill_tokens=64)
    spec = EngineSpec(name="m", path=str(args.folder), engine=config, scheduler=scheduler)
    moved = step_programs(spec).cost(1, 1).bytes
    runner = build_engine(args.folder, "m", config, scheduler).runner
    threads = num_cores()
    calls = {"step": decoder(runner), "sweep": sweeper(moved, threads)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    end = time.monotonic() + args.seconds
    while time.monotonic() < end and len(found["step"]) < MOST_TOKENS - len(PROMPT):
        for name, call in calls.items():
            found[name] += [timed(call) for _ in range(TURNS)]
    runner.close()
    print(f"{cpu_model()}, {threads} threads, commit {commit()}; {moved / 1e9:.3f} GB a step")
    times = {name: np.array(rows) / [1, threads] for name, rows in found.items()}
    for column, clock in enumerate(("wall", "cpu")):
        for name, of in (("best", np.min), ("median", np.median)):
            step, sweep = (float(of(times[n][:, column])) for n in ("step", "sweep"))
            print(f"{clock} {name:6} step {step:7.1f} ms  sweep {sweep:7.1f} ms  share {sweep / step:.0%}")


if __name__ == "__main__":
    main()
