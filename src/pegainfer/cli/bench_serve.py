"""pegainfer bench serve: load on any OpenAI-compatible server, and what it took."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegainfer.bench.config import DatasetConfig, LoadConfig, ReportConfig, SamplingConfig, ServerConfig
from pegainfer.cli.progress import request_progress
from pegainfer.contract.errors import ConfigError

if TYPE_CHECKING:
    from pegainfer.app.text import TextSide

TokenizerPath = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Model file or folder whose tokenizer the server uses, or the default model's name. Without it "
        "prompts are token ids below --vocab-size.",
    ),
]
More = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[VALUE]...", help="More values of --goodput, --metadata, as in --goodput a:1 b:2."
    ),
]


def serve(
    more: More = None,
    *,
    tokenizer: TokenizerPath = None,
    server: ServerConfig,
    load: LoadConfig,
    dataset: DatasetConfig,
    sampling: SamplingConfig,
    report: ReportConfig,
) -> int:
    """Send requests to an OpenAI-compatible server and report throughput and latencies.

    The figures' names and the options are those of other engines' bench, so that results compare.
    """
    from pegainfer.bench.png import require_matplotlib
    from pegainfer.bench.run import Plan, run

    report = with_more(report, more or [])
    if report.plot_png:
        require_matplotlib()
    plan = Plan(
        server=server,
        load=load,
        dataset=dataset,
        sampling=sampling,
        report=report,
        text=BenchTokenizer.load(tokenizer) if tokenizer is not None else None,
    )
    with request_progress(load.num_prompts, shown=not report.disable_tqdm) as on_progress:
        done = run(plan, print, on_progress)
    _tell(done)
    return 0 if done.figures.completed else 1


def with_more(report: ReportConfig, values: list[str]) -> ReportConfig:
    """Values that other tools take after one flag, separated by spaces, given to the flag they fit."""
    goodput = [v for v in values if ":" in v and "=" not in v]
    metadata = [v for v in values if "=" in v]
    if len(goodput) + len(metadata) < len(values):
        rest = next(v for v in values if v not in goodput and v not in metadata)
        raise ConfigError("an argument", expected="flags, and METRIC:MS or KEY=VALUE after one", got=rest)
    if (goodput and not report.goodput) or (metadata and not report.metadata):
        raise ConfigError("values without their flag", expected="--goodput or --metadata before them",
                          got=" ".join(values))  # fmt: skip
    return dataclasses.replace(
        report, goodput=(*report.goodput, *goodput), metadata=(*report.metadata, *metadata)
    )


def _tell(done: Any) -> None:
    from pegainfer.bench.page import page
    from pegainfer.bench.png import save_png
    from pegainfer.bench.report import lines, notes
    from pegainfer.bench.result import base_path, result, save
    from pegainfer.cli.machine import commit, cpu_model, num_cores

    plan = done.plan
    stream = plan.sampling.stream_response
    remarks = notes(done.figures, done.cost, done.mismatched)
    print(
        *lines(done.figures, plan.load, plan.report, done.cost, done.probe, done.server, stream=stream),
        sep="\n",
    )
    for remark in remarks:
        print(remark, file=sys.stderr)
    report = plan.report
    if not (report.save_result or report.append_result or report.plot_timeline or report.plot_png):
        return
    path = base_path(done)
    if report.save_result or report.append_result:
        provenance = {
            "client_commit": commit(),
            "client_command": shlex.join(["pegainfer", *sys.argv[1:]]),
            "client_cpu": cpu_model(),
            "client_cores": num_cores(),
            "client_host": platform.node(),
        }
        save(path, result(done, provenance), append=report.append_result)
        print(f"saved {path}")
    if report.plot_timeline:
        target = path.with_suffix(".html")
        target.write_text(page(done, remarks), encoding="utf-8")
        print(f"saved {target}")
    if report.plot_png:
        save_png(done, path.with_suffix(".png"))
        print(f"saved {path.with_suffix('.png')}")


class BenchTokenizer:
    """Implements bench.datasets.TextTool over a model's tokenizer."""

    def __init__(self, name: str, side: TextSide) -> None:
        self.name = name
        self._tokenizer = side.tokenizer

    @classmethod
    def load(cls, reference: str) -> BenchTokenizer:
        """Fetches the default model where it is named and missing. Raises what `resolve` raises."""
        from pegainfer.app.resolve import resolve
        from pegainfer.app.text import load_text
        from pegainfer.cli.progress import download_progress

        with download_progress() as progress:
            model = resolve(reference, fetch=True, progress=progress)
        return cls(reference, load_text(model))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.special_ids)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)
