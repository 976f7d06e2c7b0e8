"""A progress bar on standard error where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

# Called when one more item is done, with the tokens generated for it.
Advance = Callable[[int], None]


@contextlib.contextmanager
def counting(label: str, total: int, show: bool) -> Iterator[Advance]:
    """Counts items and tokens a second; nothing is drawn where `show` is false or no one is looking."""
    if not (show and sys.stderr.isatty()):
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(label, total=total, rate="")
        generated = 0

        def advance(tokens: int) -> None:
            nonlocal generated
            generated += tokens
            elapsed = bars.tasks[task].elapsed or 0.0
            rate = f"{generated / elapsed:.0f} tok/s" if elapsed > 0 else ""
            bars.update(task, advance=1, rate=rate)

        yield advance
