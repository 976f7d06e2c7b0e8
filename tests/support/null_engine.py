"""The whole engine in this process, on the null device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from pegainfer.app.assemble import engine_info
from pegainfer.contract.grammar import GrammarFactory
from pegainfer.contract.handle import EngineInfo
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.null.config import NullConfig
from pegainfer.null.runner import NullRunner


def null_info(runner: NullRunner) -> EngineInfo:
    return engine_info(runner.info, "null", "NullModel", "null", max_logprobs=20)


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
