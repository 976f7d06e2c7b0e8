"""The tour of `pegainfer`: its commands, each in a file of its own."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from pegainfer import __version__
from pegainfer.cli.command_line import ModelCommand
from pegainfer.cli.flags import expand
from pegainfer.contract.errors import ConfigError

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


class _Command(NamedTuple):
    """Where a command is found, and how it becomes one of typer's."""

    module: str  # in pegainfer.cli
    function: str
    takes_environment: bool = False  # its options may come from the environment and a config file as well
    about: str | None = None  # in its group's help; None: from the function's docstring


class _Group(NamedTuple):
    about: str
    commands: dict[str, _Command]


_BENCH = {
    "engine": _Command("bench_engine", "engine", True, "Prefill and decode alone, in tokens a second."),
    "ops": _Command("bench_ops", "ops", True, "Each op alone, beside its floor."),
    "perplexity": _Command("bench_perplexity", "perplexity", True, "How well a model predicts a text."),
    "startup": _Command("bench_startup", "startup", True, "Time until ready, and memory."),
    "load": _Command("bench_load", "load", True, "Weights from their file into memory, in GB/s."),
    "tiers": _Command("bench_tiers", "tiers", True, "The first token by where a prefix lies."),
    "serve": _Command("bench_serve", "serve", False, "An OpenAI-compatible server under load."),
}
_TRACE = {"explain": _Command("trace", "explain"), "diff": _Command("trace", "diff")}
_COMMANDS: dict[str, _Command | _Group] = {
    "serve": _Command("serve", "serve", True),
    "generate": _Command("generate", "generate", True),
    "chat": _Command("chat", "chat", True),
    "run-batch": _Command("run_batch", "run_batch", True),
    "pull": _Command("pull", "pull"),
    "simulate": _Command("simulate", "simulate", True),
    "doctor": _Command("doctor", "doctor", True),
    "list": _Command("models", "list_models"),
    "show": _Command("models", "show"),
    "rm": _Command("models", "rm"),
    "ps": _Command("models", "ps"),
    "bench": _Group("Measure this machine, or a server.", _BENCH),
    "trace": _Group("What requests waited for.", _TRACE),
    "kernels": _Group("The CUDA kernels, compiled ahead of time.", {"build": _Command("kernels", "build")}),
}
# Commands of Ollama, vLLM and SGLang that have other names here, and those that have no equivalent.
_ELSEWHERE = {
    "run": "use `pegainfer chat MODEL`, or `pegainfer generate PROMPT --model MODEL` for one answer",
    "complete": "use `pegainfer generate PROMPT --model MODEL`",
    "stop": "end the server with Ctrl-C; a server of several models unloads one by POST /admin/models/unload",
    "create": "use --chat-template and --override-generation-config, in a --config file if you like",
    "cp": "use --served-model-name",
    "push": "models are only fetched; upload yours with `hf upload`",
    "ls": "use `pegainfer list`",
    "remove": "use `pegainfer rm`",
    "delete": "use `pegainfer rm`",
    "launch_server": "use `pegainfer serve`",
    "collect-env": "use `pegainfer doctor`",
    "version": "use `pegainfer --version`",
    "help": "use `pegainfer --help`",
    "latency": "use `pegainfer bench engine`",
    "throughput": "use `pegainfer bench engine`, or `pegainfer run-batch` for a file of requests",
}


class _Commands(TyperGroup):
    """A group of commands that says what takes the place of another engine's command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and args[0] in _ELSEWHERE:
            raise ConfigError(
                f"there is no command {args[0]}", where=ctx.command_path, remedy=_ELSEWHERE[args[0]]
            )
        return super().resolve_command(ctx, args)


def build_app(first: str = "") -> typer.Typer:
    """The command line, with all commands or with one of them.

    Args:
        first: the first word of the command line. If it names a command or a group, the others are left out:
            importing and describing them would take 0.12 s of the start of `serve`.
    """
    app = _group(ABOUT, _root, completion=True)
    for name in (first,) if first in _COMMANDS else _COMMANDS:
        entry = _COMMANDS[name]
        if isinstance(entry, _Command):
            _add(app, name, entry)
            continue
        group = _group(entry.about, _nothing)
        for inner, command in entry.commands.items():
            _add(group, inner, command)
        app.add_typer(group, name=name)
    return app


def _add(app: typer.Typer, name: str, command: _Command) -> None:
    module = importlib.import_module(f"pegainfer.cli.{command.module}")
    kind = ModelCommand if command.takes_environment else None
    app.command(name, cls=kind, short_help=command.about)(expand(getattr(module, command.function)))


def _group(about: str, callback: object, *, completion: bool = False) -> typer.Typer:
    """Plain help without boxes, exceptions left to `main`.

    Args:
        completion: whether it has --install-completion and --show-completion.
    """
    group = typer.Typer(
        cls=_Commands,
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
