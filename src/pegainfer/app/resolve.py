"""A model reference: the default model's name, a .gguf file, a folder of safetensors, or a hub's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from pegainfer.app import hub
from pegainfer.app.cache import DEFAULT_MODEL, Progress, cached_model
from pegainfer.app.hub import HubName
from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.vocabulary_files import VOCABULARIES, has_vocabulary
from pegainfer.runtime.user_cache import cache_folder
from pegainfer.runtime.weights.gguf_split import model_of

FORMS = (
    f"{DEFAULT_MODEL.display_name}, a .gguf file, a folder with config.json and safetensors, "
    "or owner/model of the Hugging Face hub"
)


class ModelRef(msgspec.Struct, frozen=True):
    """Where a model lies on this machine."""

    kind: Literal["gguf", "folder"]
    path: Path  # the .gguf file, a part of a split one, or the folder
    name: str  # for answers and lists


def resolve(
    reference: str,
    *,
    fetch: bool = False,
    progress: Progress | None = None,
    weights: bool = True,
    text: bool = True,
    revision: str | None = None,
    offline: bool = False,
    download_dir: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> ModelRef:
    """Finds a model. Raises ConfigError where there is none, and what `pull` raises.

    A name of the hub is fetched unless a folder of that name is there.

    Args:
        fetch: pull the default model if the cache lacks it.
        weights: a folder must have them; without, they are made up.
        text: a folder must have a tokenizer.
        revision: branch, tag or commit, of a hub name alone.
        offline: fetch nothing.
        download_dir: the folder of models of the hub; None: the hub library's own.
        tell: takes one line for the user about what is fetched from the hub, and why.
    """
    name = HubName.parse(reference)
    if revision is not None and (name is None or Path(reference).exists()):
        raise ConfigError(
            "only models of the hub have revisions", expected="owner/model", got=f"{reference!r:.200}"
        )
    if reference.lower() == DEFAULT_MODEL.name:
        return _default(fetch and not offline, progress)
    path = Path(reference).expanduser()
    try:
        if reference and path.is_dir():
            return _folder(path, weights, text)
        if path.is_file():
            return _file(path)
    except (OSError, ValueError) as e:  # a name too long, or with a null byte
        raise ConfigError("not a model reference", expected=FORMS, got=f"{e!s:.100}") from None
    if name is None or (path.suffix == ".gguf" and name.file is None):
        raise ConfigError("no such model", expected=FORMS, got=f"{reference!r:.200}", remedy="check the path")
    path = hub.fetch(
        name,
        hub.FetchOptions(revision=revision, offline=offline, weights=weights, folder=download_dir, tell=tell),
    )
    if path.suffix == ".gguf":
        return ModelRef("gguf", path, f"{name.repository}:{name.quant}" if name.quant else _stem(path))
    return ModelRef("folder", _folder(path, weights, text).path, name.repository)


def find_tokenizer(reference: str, *, offline: bool = False, download_dir: str | None = None) -> Path:
    """A folder with tokenizer.json, or a .gguf file, that another model's text is read and written with.

    Args:
        reference: such a folder or file, or a name of the hub, of which the small files are fetched.

    Raises ConfigError where there is none.
    """
    path = Path(reference).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    name = HubName.parse(reference)
    if not path.is_dir() and name is not None:
        options = hub.FetchOptions(offline=offline, weights=False, folder=download_dir)
        path = hub.fetch(name, options)
    if path.suffix != ".gguf" and not has_vocabulary(path):
        raise ConfigError(
            "no such tokenizer",
            expected=f"a folder with {' or '.join(VOCABULARIES)}, a .gguf file, or owner/model of the Hugging"
            " Face hub",
            got=f"{reference!r:.200}",
            where="tokenizer",
        )
    return path


def _default(fetch: bool, progress: Progress | None) -> ModelRef:
    path = cached_model()
    if path is None:
        if not fetch:
            raise ConfigError(
                f"the model {DEFAULT_MODEL.name} is not in the cache, or is damaged",
                where=cache_folder(),
                remedy="run `pegainfer pull`",
            )
        from pegainfer.app.pull import pull

        path = pull(progress=progress)
    return ModelRef("gguf", path, DEFAULT_MODEL.display_name)


def _file(path: Path) -> ModelRef:
    if path.suffix.lower() != ".gguf":
        raise ConfigError(
            "not a weights file that can be served",
            expected=FORMS,
            got=path.name,
            where=path,
            remedy="give the folder if this is a file of a safetensors model",
        )
    name = DEFAULT_MODEL.display_name if path.name == DEFAULT_MODEL.file_name else _stem(path)
    return ModelRef("gguf", path, name)


def _stem(path: Path) -> str:
    """The name of a model in one GGUF file or in parts."""
    return model_of(path.name) or path.stem


def _folder(path: Path, weights: bool, text: bool) -> ModelRef:
    needed = {"config.json": True, "tokenizer.json": text, "*.safetensors": weights}
    if has_vocabulary(path):  # which may be another file
        needed["tokenizer.json"] = False
    missing = [n for n, wanted in needed.items() if wanted and not any(path.glob(n))]
    if missing:
        files = sorted(path.glob("*.gguf"))
        raise ConfigError(
            "the folder holds no whole model",
            expected=", ".join(n for n, wanted in needed.items() if wanted),
            got=f"no {', no '.join(missing)}",
            where=path,
            remedy=f"give the file {files[0]}" if files else "fetch the missing files",
        )
    return ModelRef("folder", path, path.resolve().name)
