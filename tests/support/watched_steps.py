"""Serves some steps in this interpreter and prints, as JSON, what it loaded and started meanwhile.

    python -m tests.support.watched_steps BACKEND FOLDER

FOLDER holds a model and, for the backend cuda, which runs over a driver that computes nothing, `kernels`.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

# What Python itself announces before a process is started or a library loaded, and where it says which.
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
LOADS = "ctypes.dlopen"


def main(backend: str, folder: Path) -> None:
    started: list[str] = []
    libraries: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in STARTS:
            started.append(f"{event} {args}")
        elif event == LOADS:
            libraries.append(str(args[0]))

    sys.addaudithook(watch)
    with driver(backend):
        tokens = steps(backend, folder)
    print(json.dumps(
        {"tokens": tokens, "started": started, "libraries": libraries, "modules": sorted(sys.modules)}
    ))  # fmt: skip


def steps(backend: str, folder: Path) -> int:
    """Builds the engine, runs a prompt and a decoded token with every option of sampling; tokens sampled."""
    from pegainfer.contract.request import SamplingParams, pack_tokens
    from pegainfer.contract.step import NewSlot, Row, SlotBlocks, StepPlan

    prompt = [5, 17, 3, 99, 42]
    asks = SamplingParams(temperature=0.7, logprobs=2, logit_bias=((3, 1.0),), bad_words=((4, 5),))
    new = NewSlot(
        slot=0, seq=0, tokens=pack_tokens(prompt), num_prompt=len(prompt), sampling=asks, seed=1
    )  # fmt: skip
    runner = engine(backend, folder)
    blocks = (SlotBlocks(0, 0, (1,)),)
    plans = (
        StepPlan(step=1, news=(new,), blocks=blocks, rows=(Row(0, 0, len(prompt), True),)),
        StepPlan(step=2, rows=(Row(0, len(prompt), 1, True, True),)),
    )
    sampled = sum(len(runner.sample(runner.forward(plan)).wait().tokens[0]) for plan in plans)
    runner.close()
    return sampled


def driver(backend: str) -> AbstractContextManager[Any]:
    if backend != "cuda":
        return nullcontext()
    from tests.support.fake_cuda import fake_cuda

    return fake_cuda()


def engine(backend: str, folder: Path) -> Any:
    from pegainfer.app.assemble import build_engine
    from pegainfer.app.config import EngineConfig
    from pegainfer.engine.config import SchedulerConfig

    scheduler = SchedulerConfig(max_slots=3)
    if backend == "cpu":
        config = EngineConfig(backend="cpu", max_model_len=64, threads=1)
        return build_engine(folder, "m", config, scheduler).runner
    import pegainfer.kernels.load
    import pegainfer.lower.cuda.context
    from tests.support.fake_cuda import FakeLt

    pegainfer.kernels.load.folders = lambda: (folder / "kernels",)
    pegainfer.lower.cuda.context.CublasLt = FakeLt  # type: ignore[misc, assignment]
    config = EngineConfig(backend="cuda", load_format="dummy", max_model_len=64, kv_cache_memory=1 << 22)
    return build_engine(folder, "m", config, scheduler).runner


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
