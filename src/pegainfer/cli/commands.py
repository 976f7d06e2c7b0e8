"""The tour of `pegainfer`: its commands, each in a file of its own."""

from __future__ import annotations

import typer

from pegainfer import __version__
from pegainfer.cli import (
    bench_engine,
    bench_ops,
    bench_serve,
    bench_startup,
    chat,
    doctor,
    generate,
    kernels,
    pull,
    run_batch,
    serve,
    trace,
)
from pegainfer.cli.flags import expand

ABOUT = """Serves language models: Python on the host, C++ and CUDA kernels, no model framework.

\b
pegainfer chat                       a conversation in the terminal
pegainfer generate "Who are you?"    one answer
pegainfer serve                      an OpenAI-compatible server on port 8000
pegainfer run-batch -i in -o out     a file of requests to a file of answers
pegainfer doctor                     what this machine can do, and what is missing
"""


def build_app() -> typer.Typer:
    """All commands. Their modules import what is heavy when they run, so that `--help` stays quick."""
    app = _group(ABOUT, _root)
    for name, command in (
        ("serve", serve.serve),
        ("generate", generate.generate),
        ("chat", chat.chat),
        ("run-batch", run_batch.run_batch),
        ("pull", pull.pull),
        ("doctor", doctor.doctor),
    ):
        app.command(name)(expand(command))
    bench = _group("Measure this machine, or a server.", _nothing)
    bench.command("engine", short_help="Prefill and decode alone, in tokens a second.")(
        expand(bench_engine.engine)
    )
    bench.command("ops", short_help="Each op alone, beside its floor.")(expand(bench_ops.ops))
    bench.command("serve", short_help="An OpenAI-compatible server under load.")(expand(bench_serve.serve))
    bench.command("startup", short_help="Time until ready, and memory.")(expand(bench_startup.startup))
    app.add_typer(bench, name="bench")
    traces = _group("What requests waited for.", _nothing)
    traces.command("explain")(expand(trace.explain))
    traces.command("diff")(expand(trace.diff))
    app.add_typer(traces, name="trace")
    compiled = _group("The CUDA kernels, compiled ahead of time.", _nothing)
    compiled.command("build")(expand(kernels.build))
    app.add_typer(compiled, name="kernels")
    return app


def _group(about: str, callback: object) -> typer.Typer:
    """Plain help without boxes, no completion, exceptions left to `main`."""
    group = typer.Typer(
        help=about,
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
    )
    group.callback(help=about)(callback)  # type: ignore[type-var]
    return group


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pegainfer {__version__}")
        raise typer.Exit()


def _root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_show_version, help="Print the version and exit."
    ),
) -> None:
    """The options of `pegainfer` itself; `--version` acts in its callback."""


def _nothing() -> None:
    """A group without options of its own."""
