"""pegainfer pull: a model of the hub, or the default one, into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from pegainfer.contract.errors import ConfigError


def pull(
    model: Annotated[
        str | None, typer.Argument(help="owner/model of the Hugging Face hub; left out: the default model.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model of the hub; default: main.")
    ] = None,
    download_dir: Annotated[
        str | None, typer.Option(help="Folder for models of the hub; default: that library's own cache.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read a cached file anew and check its SHA-256.")
    ] = False,
) -> None:
    """Fetch a model and print its path.

    Whether it can be served is decided before its weights are fetched. Of several GGUF files the best one for
    this machine's memory is taken, and standard error says why; owner/model:QUANT names another.

    The default model is checked against its SHA-256 and kept in the cache folder; models of the hub are kept
    where that library keeps them.
    """
    from pegainfer.app.cache import DEFAULT_MODEL
    from pegainfer.app.pull import pull as fetch
    from pegainfer.app.resolve import resolve
    from pegainfer.cli.progress import download_progress, say

    if model is not None and model.lower() != DEFAULT_MODEL.name:
        if verify:
            raise ConfigError("--verify is for the default model", got=model)
        print(resolve(model, revision=revision, download_dir=download_dir, tell=say).path)
        return
    if download_dir is not None:
        raise ConfigError("the default model has its own cache", remedy="set PEGAINFER_CACHE instead")
    if revision is not None:
        raise ConfigError("the default model has no revisions", remedy="leave --revision out")
    with download_progress() as progress:
        path = fetch(verify=verify, progress=progress)
    print(path)
