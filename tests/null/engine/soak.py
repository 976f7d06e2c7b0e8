"""Random scenarios on the null device: python -m tests.null.engine.soak --seeds 1000

Every seed draws a device (groups, tiny pools, commits a row, lower tiers, adapters, ranks), a configuration
and a stream of requests with shared prefixes, forks, priorities, deadlines and cancels; meanwhile adapters
come and go and the prefix cache is reset. After every step all containers are checked, and at the end every
token is compared with what the null model predicts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from pegainfer.contract.errors import QueueFullError, RequestError
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import PageGroup, StateGroup, StepPlan
from pegainfer.contract.tiers import Tier
from pegainfer.engine.scheduler import SchedulerConfig
from pegainfer.null.config import Faults, NullConfig
from tests.null.engine.harness import EOS, SPECS, Driver, null_config, request

MAX_LEN = 64
STEP_LIMIT = 5_000  # of the clock; the largest scenario needs a few hundred


def random_faults(seed: int) -> Faults:
    """One row in fifty fails alone, on all tensor-parallel ranks."""

    def faults(plan: StepPlan) -> dict[int, str]:
        r = random.Random(seed + plan.step)
        return {i: "not finite" for i in range(len(plan.rows)) if r.random() < 0.02}

    return faults


def random_device(r: random.Random, seed: int) -> NullConfig:
    """Pools from what one sequence needs upwards, so that preemption is common."""
    kv = SPECS[r.choice(sorted(SPECS))]
    blocks = []
    for group in kv.groups:
        if isinstance(group, StateGroup):
            blocks.append(r.randint(1, 8))
        elif group.window:
            blocks.append(r.randint(3, 24))
        else:
            assert isinstance(group, PageGroup)
            blocks.append(r.choice([8, 12, 16, 18, 24, 40]) * 4 // group.block_size)
    return null_config(
        kv=kv,
        num_blocks=tuple(blocks),
        max_slots=r.choice([1, 2, 4, 6, 8]),
        max_tokens=r.choice([1, 9, 16, 24, 40]),
        max_model_len=MAX_LEN,
        max_commit=r.choice([1, 1, 2, 4]),
        zero_commits=r.choice([0.0, 0.0, 0.3]),
        seed=seed,
        virtual=True,
        step_seconds=r.choice([0.0, 0.0, 0.01]),
        token_seconds=r.choice([0.0, 0.001, 0.02]),
        faults=random_faults(r.getrandbits(32)) if r.random() < 0.2 else None,
        tiers=random_tiers(r, blocks) if r.random() < 0.5 else (),
        transfer_steps=r.choice([1, 3, 9]),
        failed_transfers=r.choice([0.0, 0.2, 0.4]),
        max_adapters=r.choice([0, 0, 1, 3]),
    )


def random_ranks(r: random.Random, config: SchedulerConfig) -> tuple[int, int]:
    """Tensor-parallel and data-parallel ranks."""
    data_ranks = r.choice([1, 1, 2, 3])
    if config.max_slots is not None:
        data_ranks = min(data_ranks, config.max_slots)
    return r.choice([1, 1, 2, 3]), data_ranks


def random_tiers(r: random.Random, blocks: list[int]) -> tuple[Tier, ...]:
    """One or two tiers, each of which may lack a group."""
    tiers = [Tier(kind="host", num_blocks=tuple(r.choice([0, n // 2, 2 * n]) for n in blocks))]
    if r.random() < 0.4:
        tiers.append(Tier(kind="disk", num_blocks=tuple(r.choice([0, 4 * n]) for n in blocks)))
    return tuple(tiers)


def random_config(r: random.Random) -> SchedulerConfig:
    return SchedulerConfig(
        pipeline_depth=r.choice([1, 2]),
        prefix_cache=r.random() < 0.75,
        max_prefill_tokens=r.choice([None, None, 3, 8]),
        max_slots=r.choice([None, None, None, 2]),
        watermark=r.choice([0.0, 0.01, 0.2]),
        aging_seconds=r.choice([1.0, 10.0, 1000.0]),
        max_wait_seconds=r.choice([0.0, 0.0, 40.0]),
        target_itl_ms=r.choice([0.0, 20.0, 100.0]),
    )


def random_request(
    r: random.Random, name: str, base: list[int], now: float, adapters: list[str]
) -> GenerateRequest:
    """Prompts that share a random piece of `base` with others. `adapters`: names of the loaded ones."""
    length = r.choice([r.randint(1, 10), r.randint(1, 10), r.randint(1, 50)])
    shared = r.choice([0, length, r.randint(0, length)])
    prompt = base[:shared] + [r.randrange(20) for _ in range(length - shared)]
    most = r.choice([None, 0, 1, 5, 20, 20, 30])
    return request(
        name,
        prompt,
        n=r.choice([1, 1, 1, 2, 4]),
        salt=r.choice(["", "", "salt"]),
        adapter=r.choice([None, *adapters]),
        priority=r.choice([0, 0, 0, -1, 2]),
        tenant=r.choice(["", "", "a", "b"]),
        deadline=r.choice([None, None, None, now + r.randint(0, 200)]),
        eos=r.choice([(EOS,), (), ()]),
        seed=r.randrange(1 << 64),
        temperature=r.choice([0.0, 1.0]),
        max_tokens=most,
        min_tokens=r.choice([0, 0, 3]) if most is None or most > 3 else 0,
        stop_token_ids=r.choice([(), (), (3,), (3, 4, 5)]),
        ignore_eos=r.random() < 0.2,
        logprobs=r.choice([None, None, 2]),
        prompt_logprobs=r.choice([None, None, None, 1]),
    )


def change_adapters(r: random.Random, driver: Driver, files: list[Path]) -> None:
    """Unloads an adapter or loads one of `files`; a name may come back with other content."""
    if driver.adapters and r.random() < 0.5:
        driver.unload_adapter(r.choice(sorted(driver.adapters)))
        return
    try:
        driver.load_adapter(r.choice("abcd"), str(r.choice(files)))
    except RequestError:
        driver.counts["adapters refused"] += 1


def run_seed(seed: int, files: list[Path]) -> Counter[str]:
    """One scenario; raises AssertionError (InvariantError included) where a promise is broken."""
    r = random.Random(seed)
    config = random_config(r)
    ranks = random_ranks(r, config)
    driver = Driver(
        random_device(r, seed),
        config,
        ranks=ranks,
        adapter_steps=(1, 3, 12)[seed % 3],
        failed_loads=(0.0, 0.2)[seed % 2],
    )
    base = [r.randrange(20) for _ in range(MAX_LEN)]
    refused = 0
    for i in range(r.randint(4, 24)):
        try:
            driver.add(random_request(r, f"r{i}", base, driver.now, sorted(driver.adapters)))
        except (RequestError, QueueFullError):
            refused += 1
        for _ in range(r.choice([0, 0, 0, 1, 4, 12])):
            driver.step()
        if r.random() < 0.2:
            driver.cancel(f"r{r.randint(0, i)}", r.choice([None, None, 0, 1]))
        if driver.null.max_adapters and r.random() < 0.4:
            change_adapters(r, driver, files)
        if r.random() < 0.05:
            driver.reset_prefix_cache()
    driver.run(STEP_LIMIT)
    driver.judge()
    driver.counts["seeds"] += 1
    driver.counts["seeds with tensor ranks"] += ranks[0] > 1
    driver.counts["seeds with data ranks"] += ranks[1] > 1
    driver.counts["refused"] += refused
    return driver.counts


def run_seeds(first: int, count: int) -> Counter[str]:
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in "xyz"]
        for file in files:
            file.write_text(f"an adapter, {file.name}")
        for seed in range(first, first + count):
            try:
                total += run_seed(seed, files)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many scenarios")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    begin = time.monotonic()
    for name, value in sorted(run_seeds(args.first, args.seeds).items()):
        print(f"{name:24} {value:>12,}")
    print(f"{'seconds':24} {time.monotonic() - begin:>12.1f}")


if __name__ == "__main__":
    main()
