"""pegainfer bench load: how fast a model's weights get from their file into the layout that kernels read."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.target import MODEL_HELP, ModelFlags, choose
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig

LOADING = ("read", "pack", "plan", "graphs", "weights")  # start-up phases that weights are loaded in


@dataclass(frozen=True, kw_only=True)
class LoadBenchFlags:
    rounds: int = field(
        default=3, metadata={"help": "Times to load it. The first may wait for the disk, the others do not."}
    )
    output: str = field(
        default="bench/results/load.jsonl", metadata={"help": "File to append JSON lines to."}
    )

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError("rounds of a bench", expected="≥ 1", got=self.rounds, where="--rounds")


def load(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    bench: LoadBenchFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    given: Given,
) -> int:
    """Load a model some times: seconds by phase, GB/s of its file, and the most memory the process held."""
    import resource

    from pegainfer.cli.machine import append_result, num_cores, provenance
    from pegainfer.cli.spec import build

    target = choose(model, flags, engine, SchedulerConfig(), given)
    if target.model is None:
        raise ConfigError("the null device loads no weights", expected="cpu or cuda", where="--device")
    nbytes, tensors = _stored(target.model.path, target.spec.engine)
    where = provenance(engine.threads or num_cores())
    rates, phases = [], []
    for _ in range(bench.rounds):
        started = time.perf_counter()
        built = build(target.spec)
        seconds = time.perf_counter() - started
        built.runner.close()
        phases.append({name: round(s, 3) for name, s in built.info.startup_seconds.items()})
        loading = sum(s for name, s in built.info.startup_seconds.items() if name in LOADING)
        rates.append(nbytes / loading / 1e9)
        shown = ", ".join(f"{name} {s:.2f}" for name, s in phases[-1].items())
        print(f"{rates[-1]:6.2f} GB/s   {seconds:.2f} s ({shown})")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{tensors} weights, {nbytes / 1e9:.2f} GB, on {built.info.device}")
    print(f"median {statistics.median(rates):.2f} GB/s; the process held {most / 1e9:.2f} GB at most")
    row = {**where, "bench": "load", "model": built.info.model, "device": built.info.device}
    row |= {"bytes": nbytes, "gb_s": [round(r, 3) for r in rates], "phases": phases, "most_bytes": most}
    append_result(Path(bench.output), row)
    return 0


def _stored(path: Path, engine: EngineConfig) -> tuple[int, int]:
    """Bytes and number of the weights as they are stored, or as they are made up."""
    from pegainfer.app.load import open_model

    with open_model(path, engine.load_format) as (model, _):
        weights = model.weights.values()
        return sum(w.scheme.nbytes(w.shape) for w in weights), len(weights)
