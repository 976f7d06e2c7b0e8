"""pegainfer pull: the default model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    verify: Annotated[
        bool, typer.Option("--verify", help="Read a cached file anew and check its SHA-256.")
    ] = False,
) -> None:
    """Fetch the default model.

    It is checked against its SHA-256, kept in the cache folder, and its path printed.
    """
    from pegainfer.app.pull import pull as fetch
    from pegainfer.cli.progress import download_progress

    with download_progress() as progress:
        path = fetch(verify=verify, progress=progress)
    print(path)
