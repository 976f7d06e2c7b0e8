"""The whole engine in this process, on the null device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from pegainfer.contract.grammar import GrammarFactory
from pegainfer.contract.handle import EngineInfo
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.engine.null import NullConfig, NullRunner


def null_info(runner: NullRunner) -> EngineInfo:
    return EngineInfo(
        model="null",
        architecture="NullModel",
        device="null",
        vocab_size=runner.info.vocab_size,
        max_model_len=runner.info.max_model_len,
        block_size=16,
        num_blocks=runner.info.num_blocks[0],
        max_slots=runner.info.max_slots,
    )


@contextlib.contextmanager
def null_engine(
    config: SchedulerConfig | None = None,
    *,
    grammars: GrammarFactory | None = None,
    clock: Callable[[], float] = time.monotonic,
    **null: Any,
) -> Iterator[InProcessEngine]:
    """Keyword arguments are NullConfig's. The engine has ended when the context does."""
    runner = NullRunner(NullConfig(**null))
    engine = InProcessEngine(runner, null_info(runner), config, grammars=grammars, clock=clock)
    try:
        yield engine
    finally:
        engine.close()
