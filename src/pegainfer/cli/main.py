"""The `pegainfer` command, and how every command ends.

Exit codes: 0 done, 1 ended unclean (requests aborted, a check that failed), 2 the user can cure it (one line
on stderr says how), 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

from pegainfer.cli.engine_child import early_child
from pegainfer.cli.interrupts import EXIT_INTERRUPTED, end_by_signal, quieten_interrupts
from pegainfer.contract.errors import EXIT_FAILED, EXIT_USER, EngineDeadError, PegaError

# A full disk, a quota, a file that may grow no further, a device that fails: not the program's fault.
CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; whatever the user can cure ends as one line."""
    _prepare_output()
    try:
        with early_child(sys.argv[1:] if argv is None else ()):
            from pegainfer.cli.commands import build_app

            given = sys.argv[1:] if argv is None else list(argv)
            code = build_app(given[0] if given else "")(given, prog_name="pegainfer", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except PegaError as error:
        return _complain(str(error), EXIT_FAILED if isinstance(error, EngineDeadError) else EXIT_USER)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as in `| head`: what is still buffered has nowhere to go either.
        _forget_output()
        return 0
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        _forget_output()
        where = f" {error.filename}" if error.filename else ""
        return _complain(f"cannot write{where}: {error.strerror}", EXIT_FAILED)
    except Exception as error:
        return _wrong_command_line(error)


def run() -> int:
    """`main` as the whole of a process: the `pegainfer` command."""
    quieten_interrupts()
    try:
        code = main()
        end_by_signal()
    except KeyboardInterrupt:  # another one, while the first was being dealt with
        return EXIT_INTERRUPTED
    return code


def _prepare_output() -> None:
    """Output that any terminal takes: a closed one goes nowhere, letters that it lacks become `?`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, as in `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _forget_output() -> None:
    """What is still buffered goes nowhere, so that the interpreter's end does not fail on it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _wrong_command_line(error: Exception) -> int:
    """Ends a usage error of typer's, whose class moved between its versions; raises any other exception."""
    if type(error).__name__ == "Abort":
        return EXIT_INTERRUPTED
    if not hasattr(error, "format_message"):
        raise error
    message: str = error.format_message()
    if message.startswith("Usage:"):  # a group without a command: its help
        print(message, file=sys.stderr)
        return EXIT_USER
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "pegainfer"
    return _complain(f"{message.rstrip('.')}; see {command} --help", EXIT_USER)


def _complain(message: str, code: int) -> int:
    """One line on stderr, whatever the message holds: it may quote a file's bytes."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    print(f"pegainfer: error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(run())
