"""pegainfer run-batch: a file of requests to a file of answers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.progress import counted_progress
from pegainfer.cli.spec import LOG_FORMAT
from pegainfer.cli.target import MODEL_HELP, ModelFlags, Target, choose, load_text_side
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.frontend.http.config import HttpConfig

if TYPE_CHECKING:
    from pegainfer.cli.supervisor import Supervisor

PROGRESS_STEPS = 20  # lines on standard error where it is no terminal
# What of the server's settings a batch has, too.
_OF_HTTP = (
    "served_model_name",
    "openai_defaults",
    "generation_config",
    "override_generation_config",
    "chat_template_kwargs",
    "tool_call_parser",
    "reasoning_parser",
)


def _flag(name: str) -> dict[str, str]:
    """The help of a server's flag."""
    return {"help": HttpConfig.__dataclass_fields__[name].metadata["help"]}


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """How a batch is answered. Fields of the server's settings have their defaults."""

    concurrency: int = field(default=64, metadata={"help": "Requests under way at a time."})
    served_model_name: tuple[str, ...] = field(default=(), metadata=_flag("served_model_name"))
    openai_defaults: bool = field(default=False, metadata=_flag("openai_defaults"))
    generation_config: Literal["none", "auto"] = field(default="auto", metadata=_flag("generation_config"))
    override_generation_config: str = field(default="", metadata=_flag("override_generation_config"))
    chat_template_kwargs: tuple[str, ...] = field(
        default=HttpConfig.chat_template_kwargs, metadata=_flag("chat_template_kwargs")
    )
    tool_call_parser: str = field(default=HttpConfig.tool_call_parser, metadata=_flag("tool_call_parser"))
    reasoning_parser: str = field(default=HttpConfig.reasoning_parser, metadata=_flag("reasoning_parser"))

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError("concurrency", expected="≥ 1", got=self.concurrency, where="--concurrency")

    def http(self) -> HttpConfig:
        return HttpConfig(**{name: getattr(self, name) for name in _OF_HTTP})


def run_batch(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    input: Annotated[Path, typer.Option("--input", "-i", help="Requests, one JSON object a line.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Answers; a run goes on where one ended.")],
    batch: BatchFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    given: Given,
) -> int:
    """Answer a file of requests, in OpenAI's batch format.

    Lines are answered as the server would answer them; what fails says so in its own line. The output is
    written as answers come: a run that was interrupted goes on where it ended.
    """
    from pegainfer.frontend.http.batch.batch_files import count_lines, open_input, open_output

    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    batch.http()  # faulty settings are told before anything is loaded
    if output.exists() and input.exists() and output.samefile(input):
        raise ConfigError("the output would overwrite the input", got=output)
    total = count_lines(input)
    if "--target-itl-ms" not in given:  # nobody waits for the next token
        scheduler = dataclasses.replace(scheduler, target_itl_ms=0.0)
    target = choose(model, flags, engine, scheduler, given)
    answers, done = open_output(output)
    with answers, open_input(input) as requests:
        from pegainfer.cli.supervisor import supervised
        from pegainfer.frontend.http.connection.server import run_loop

        with supervised(target.spec, restarts=0) as supervisor:
            return run_loop(_run(Job(requests, total, answers, done, batch), target, supervisor))


@dataclass(frozen=True)
class Job:
    """total: lines of the requests. done: keys of those that have their answer."""

    requests: IO[bytes]
    total: int
    answers: IO[bytes]
    done: set[str]
    batch: BatchFlags


async def _run(job: Job, target: Target, supervisor: Supervisor) -> int:
    """Returns the exit code: 0 also where lines failed, for their answers say so."""
    from pegainfer.frontend.http.app import create_app
    from pegainfer.frontend.http.batch.batch import BatchRun

    connecting = asyncio.ensure_future(supervisor.connect())
    side = await asyncio.to_thread(load_text_side, target)
    client = await connecting
    app = create_app(
        client, side.tokenizer, side.template, job.batch.http(), generation=side.generation,
        pooling=side.pooling,
    )  # fmt: skip
    with counted_progress(job.total) as progress:
        progress(_share(0, job.total))
        step = itertools.count(1)
        run = BatchRun(
            app,
            job.answers,
            job.done,
            concurrency=job.batch.concurrency,
            on_line=lambda: progress(_share(next(step), job.total)),
        )
        counts = await run.run(job.requests)
    client.close()
    await supervisor.check_end()
    print(
        f"{job.total} requests: {counts.answered} answered, {counts.failed} failed, "
        f"{counts.kept} from an earlier run",
        file=sys.stderr,
    )
    return 0


def _share(done: int, total: int) -> str:
    """What the progress shows; elsewhere than on a terminal, a line each time it changes."""
    return f"answering ({done * PROGRESS_STEPS // max(1, total) * 100 // PROGRESS_STEPS} %)"
