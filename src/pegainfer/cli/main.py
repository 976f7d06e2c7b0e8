"""The `pegainfer` command: the tour of its parts, and how every command ends.

Exit codes: 0 done, 1 ended unclean (requests aborted, a check that failed), 2 the user can cure it (one line
on stderr says how), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from pegainfer import __version__
from pegainfer.contract.errors import EngineDeadError, PegaError

ABOUT = """Serves language models: Python on the host, C++ kernels, no model framework.

\b
pegainfer generate "What is the capital of France?"    an answer in the terminal
pegainfer serve                                        an OpenAI-compatible server on port 8000
pegainfer doctor                                       what this machine can do, and what is missing
"""

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pegainfer {__version__}")
        raise typer.Exit()


def _root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_show_version, help="Print the version and exit."
    ),
) -> None:
    pass


def build_app() -> typer.Typer:
    """All commands. Their modules import what is heavy when they run, so that `--help` stays quick."""
    from pegainfer.cli import bench_engine, bench_ops, bench_startup, doctor, generate, pull, serve
    from pegainfer.cli.flags import expand

    settings = {"rich_markup_mode": None, "add_completion": False, "pretty_exceptions_enable": False}
    app = typer.Typer(help=ABOUT, no_args_is_help=True, **settings)  # type: ignore[arg-type]
    app.callback(help=ABOUT)(_root)
    for name, command in (
        ("serve", serve.serve),
        ("generate", generate.generate),
        ("pull", pull.pull),
        ("doctor", doctor.doctor),
    ):
        app.command(name)(expand(command))
    group = typer.Typer(no_args_is_help=True, **settings)  # type: ignore[arg-type]
    group.callback(help="Measure this machine.")(_group)
    group.command("engine")(expand(bench_engine.engine))
    group.command("ops")(expand(bench_ops.ops))
    group.command("startup")(expand(bench_startup.startup))
    app.add_typer(group, name="bench")
    return app


def _group() -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; whatever the user can cure ends as one line."""
    try:
        code = build_app()(None if argv is None else list(argv), prog_name="pegainfer", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except PegaError as error:
        return _complain(str(error), EXIT_FAILED if isinstance(error, EngineDeadError) else EXIT_USER)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as in `| head`: what is still buffered has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        message: str = error.format_message()
        if message.startswith("Usage:"):  # a group without a command: its help
            print(message, file=sys.stderr)
            return EXIT_USER
        return _complain(f"{message.rstrip('.')}; see {_help_of(error)}")


def _complain(message: str, code: int = EXIT_USER) -> int:
    """One line on stderr, whatever the message holds: it may quote a file's bytes."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    print(f"pegainfer: error: {line}", file=sys.stderr)
    return code


def _help_of(error: Exception) -> str:
    """The help command that belongs to a wrong command line."""
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'pegainfer'} --help"


if __name__ == "__main__":
    sys.exit(main())
