"""The scheduler's part of a snapshot of the statistics."""

from __future__ import annotations

from pegainfer.contract.event import EngineStats
from pegainfer.engine.counters import Counters
from pegainfer.engine.residents import Residents


def scheduler_stats(residents: Residents, c: Counters, live: int, in_flight: int) -> EngineStats:
    """What only the loop knows (host seconds) is left to it.

    Args:
        live: sequences that are not finished.
        in_flight: plans that are not committed.
    """
    running = residents.num_running
    pools = [home.kv.pools[0] for home in residents.homes]
    return EngineStats(
        running=running,
        waiting=live - running,
        loading=len(residents.loading),
        tiers=residents.tiering.stats(),
        free_blocks=sum(pool.available for pool in pools),
        total_blocks=sum(pool.num_blocks for pool in pools),
        steps=c.steps,
        last_step=c.last_step,
        in_flight=in_flight,
        preemptions=residents.num_preemptions,
        prompt_tokens=c.prompt_tokens,
        cached_tokens=c.cached_tokens,
        generation_tokens=c.generation_tokens,
        prefix_queries=c.prefix_queries,
        prefix_hits=c.prefix_hits,
        rejections=c.rejections,
        adapter_loads=residents.adapters.num_loads,
        finished=dict(c.finished),
        step_seconds=c.step_seconds,
        kind_steps=dict(c.kind_steps),
        kind_seconds=dict(c.kind_seconds),
        step_sizes=tuple(c.step_sizes),
        step_tokens=c.step_tokens,
        price_ratios=tuple(c.price_ratios),
        price_ratio_sum=c.price_ratio_sum,
        slow_steps=c.slow_steps,
    )
