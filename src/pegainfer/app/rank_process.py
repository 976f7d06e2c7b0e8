"""A rank's process: `python -m pegainfer.app.rank_process CHANNEL MEMORY ORDER`, started by app/ranks.py.

CHANNEL and MEMORY are inherited descriptors, ORDER is a RankOrder as JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pegainfer.app.config import EngineConfig
from pegainfer.contract.step import Runner
from pegainfer.engine.config import SchedulerConfig
from pegainfer.runtime.rank_memory import RankMemory


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """What a rank loads.

    Args:
        path: of the model's file or folder.
        tokenizer: of what takes the place of the model's own tokenizer; empty: its own.
        slots, length, num_blocks: bounds as rank 0 decided them, see RunnerInfo.
        wait_seconds: for a rank that does not join a sum.
    """

    path: str
    tokenizer: str
    rank: int = 0
    ranks: int
    slots: int
    length: int
    num_blocks: tuple[int, ...]
    engine: EngineConfig
    scheduler: SchedulerConfig
    wait_seconds: float


def build_rank(order: RankOrder, memory: RankMemory) -> Runner:
    """Loads a rank's part of the model. Raises ConfigError, ModelFileError, OpError, UnsupportedError."""
    from pegainfer.app.bounds import model_groups, runner_bounds, step_formats
    from pegainfer.app.load import make_backend, open_model
    from pegainfer.app.open_tiers import with_tiers
    from pegainfer.app.tiers import tiers_of_rank

    config, scheduler = order.engine, order.scheduler
    path, at = Path(order.path), config.place_of(order.rank)
    tokenizer = Path(order.tokenizer) if order.tokenizer else None
    with open_model(path, config.load_format, at, config.quantization, tokenizer=tokenizer) as (model, _):
        groups = model_groups(model, config)
        info = runner_bounds(model, order.slots, order.length, order.num_blocks, config, scheduler)
        if config.backend == "cuda":
            from pegainfer.app.gpu import build_runner

            return build_runner(model, path, groups, info, config, scheduler, at, memory).runner
        backend, _ = make_backend(model.tensors(order.length), config, memory=memory)
        with tiers_of_rank(config, scheduler, groups, path, at) as tiers:
            runner = model.build(
                with_tiers(info, tiers),
                groups,
                backend,
                steps=step_formats(config),
                max_logprobs=scheduler.max_logprobs,
            )
            tiers.give_to(runner)
        return runner


def main(arguments: Sequence[str]) -> None:
    """`arguments`: see above. Runs until the engine's process ends; see parallel/serve.py."""
    from pegainfer.parallel.serve import serve_rank

    channel, memory_fd = map(int, arguments[:2])
    order = msgspec.json.decode(arguments[2], type=RankOrder)
    logging.basicConfig(
        level=logging.WARNING, format=f"%(levelname)s rank {order.rank} %(name)s: %(message)s"
    )
    faulthandler.enable()
    gc.disable()  # until all is built, which stays
    memory = RankMemory(memory_fd, order.rank, order.ranks, order.wait_seconds)

    def build() -> Runner:
        runner = build_rank(order, memory)
        gc.freeze()
        gc.enable()
        return runner

    serve_rank(channel, build, lambda: memory.fail(order.rank))


if __name__ == "__main__":
    main(sys.argv[1:])
