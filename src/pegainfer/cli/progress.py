"""Progress on stderr: bars on a terminal, one line a phase elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from pegainfer.app.cache import Progress


def say(line: str) -> None:
    """One line for the user, beside what the command prints."""
    print(f"pegainfer: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def download_progress() -> Iterator[Progress]:
    """A callback for pull and resolve; nothing is drawn, or imported, before its first call."""
    shown: list[Progress] = []
    with contextlib.ExitStack() as stack:

        def report(phase: str, done: int, total: int) -> None:
            if not shown:
                shown.append(stack.enter_context(_bars()) if sys.stderr.isatty() else _lines())
            shown[0](phase, done, total)

        yield report


@contextlib.contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield report


@contextlib.contextmanager
def request_progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A callback that takes how many requests have ended since its last call; on a terminal only."""
    if not shown or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("requests", total=total)
        yield lambda done: bars.advance(task, done)


@contextlib.contextmanager
def counted_progress(total: int) -> Iterator[Callable[[str], None]]:
    """A callback that says what is done next, `total` times at the most."""
    if not sys.stderr.isatty():
        yield _changes()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total, completed=-1)
        yield lambda what: bars.update(task, description=what, advance=1)


def _changes() -> Callable[[str], None]:
    """Prints what differs from the line before."""
    last = [""]

    def report(what: str) -> None:
        if what != last[0]:
            last[0] = what
            print(what, file=sys.stderr, flush=True)

    return report


def _lines() -> Progress:
    seen: set[str] = set()

    def report(phase: str, done: int, total: int) -> None:
        if phase not in seen:
            seen.add(phase)
            print(f"{phase}: {total / 1e6:.0f} MB", file=sys.stderr, flush=True)

    return report
