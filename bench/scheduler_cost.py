"""Host cost of the scheduler: one `schedule` and one `commit` with N sequences that decode.

    python bench/scheduler_cost.py

No runner takes part: results are made up. Prints the median over the steps, of which one in sixteen a
sequence fills a block.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.contract.step import KVSpec, PageGroup, RunnerInfo, StepPlan, StepResult
from pegainfer.engine.scheduler import Scheduler, SchedulerConfig

PROMPT = 32  # tokens
TOKEN = 5  # drawn by every row, never a stop


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(step=plan.step, tokens=tuple((TOKEN,) if row.sample else () for row in plan.rows))


def measure(sequences: int, steps: int, depth: int) -> tuple[float, float]:
    """Median seconds of schedule and of commit."""
    length = PROMPT + 2 * steps
    info = RunnerInfo(
        kv=KVSpec((PageGroup(name="full", block_size=16, bytes_per_block=1),)),
        num_blocks=(sequences * (length // 16 + 2),),
        max_slots=sequences,
        max_tokens=max(512, sequences),
        max_model_len=length,
        vocab_size=50_000,
    )
    scheduler = Scheduler(info, SchedulerConfig(pipeline_depth=depth))
    for i in range(sequences):
        prompt = pack_tokens([i] * PROMPT)
        sampling = SamplingParams(seed=i, ignore_eos=True)
        scheduler.add(GenerateRequest(id=f"request-{i}", prompt=prompt, sampling=sampling), 0.0)
    flight: deque[StepPlan] = deque()
    schedules: list[float] = []
    commits: list[float] = []
    while len(commits) < steps:
        begin = time.perf_counter()
        plan, _ = scheduler.schedule(0.0)
        planned = time.perf_counter()
        if plan is not None:
            flight.append(plan)
            if len(flight) < depth:
                continue
        oldest = flight.popleft()
        result = result_of(oldest)
        received = time.perf_counter()
        scheduler.commit(oldest, result, 0.0)
        committed = time.perf_counter()
        if plan is not None and plan.num_tokens == len(plan.rows) == len(oldest.rows) == sequences:
            schedules.append(planned - begin)
            commits.append(committed - received)
    return statistics.median(schedules), statistics.median(commits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=2)
    args = parser.parse_args()
    print("sequences   schedule us   commit us   sum us")
    for n in args.sequences:
        schedule, commit = measure(n, args.steps, args.depth)
        print(f"{n:9} {schedule * 1e6:13.1f} {commit * 1e6:11.1f} {(schedule + commit) * 1e6:8.1f}")


if __name__ == "__main__":
    main()
