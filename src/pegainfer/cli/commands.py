"""The tour of `pegainfer`: its commands, each in a file of its own."""

from __future__ import annotations

import typer

from pegainfer import __version__
from pegainfer.cli import (
    bench_engine,
    bench_load,
    bench_ops,
    bench_perplexity,
    bench_serve,
    bench_startup,
    bench_tiers,
    chat,
    doctor,
    generate,
    kernels,
    models,
    pull,
    run_batch,
    serve,
    simulate,
    trace,
)
from pegainfer.cli.command_line import ModelCommand
from pegainfer.cli.flags import expand

ABOUT = """Serves language models: Python on the host, C++ and CUDA kernels, no model framework.

\b
pegainfer chat                       a conversation in the terminal
pegainfer generate "Who are you?"    one answer
pegainfer serve                      an OpenAI-compatible server on port 8000
pegainfer run-batch -i in -o out     a file of requests to a file of answers
pegainfer pull owner/model           a model of the hub; list, show and rm: those that are here
pegainfer ps                         the servers that run
pegainfer simulate MODEL --card H100 how fast it will serve, without a GPU
pegainfer doctor                     what this machine can do, and what is missing
"""


def build_app() -> typer.Typer:
    """All commands. Their modules import what is heavy when they run, so that `--help` stays quick."""
    app = _group(ABOUT, _root, completion=True)
    for name, command in (
        ("serve", serve.serve),
        ("generate", generate.generate),
        ("chat", chat.chat),
        ("run-batch", run_batch.run_batch),
        ("pull", pull.pull),
        ("simulate", simulate.simulate),
        ("doctor", doctor.doctor),
    ):
        app.command(name, cls=None if command is pull.pull else ModelCommand)(expand(command))
    for name, manage in (
        ("list", models.list_models),
        ("show", models.show),
        ("rm", models.rm),
        ("ps", models.ps),
    ):
        app.command(name)(manage)
    bench = _group("Measure this machine, or a server.", _nothing)
    for name, measure, about in (
        ("engine", bench_engine.engine, "Prefill and decode alone, in tokens a second."),
        ("ops", bench_ops.ops, "Each op alone, beside its floor."),
        ("perplexity", bench_perplexity.perplexity, "How well a model predicts a text."),
        ("startup", bench_startup.startup, "Time until ready, and memory."),
        ("load", bench_load.load, "Weights from their file into memory, in GB/s."),
        ("tiers", bench_tiers.tiers, "The first token by where a prefix lies."),
    ):
        bench.command(name, cls=ModelCommand, short_help=about)(expand(measure))
    bench.command("serve", short_help="An OpenAI-compatible server under load.")(expand(bench_serve.serve))
    app.add_typer(bench, name="bench")
    traces = _group("What requests waited for.", _nothing)
    traces.command("explain")(expand(trace.explain))
    traces.command("diff")(expand(trace.diff))
    app.add_typer(traces, name="trace")
    compiled = _group("The CUDA kernels, compiled ahead of time.", _nothing)
    compiled.command("build")(expand(kernels.build))
    app.add_typer(compiled, name="kernels")
    return app


def _group(about: str, callback: object, *, completion: bool = False) -> typer.Typer:
    """Plain help without boxes, exceptions left to `main`.

    Args:
        completion: whether it has --install-completion and --show-completion.
    """
    group = typer.Typer(
        help=about,
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=completion,
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
