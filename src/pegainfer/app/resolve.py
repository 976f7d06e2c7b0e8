"""A model reference: the default model's name, a .gguf file, or a folder in Hugging Face's form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pegainfer.app.cache import DEFAULT_MODEL, Progress, cache_folder, cached_model
from pegainfer.contract.errors import ConfigError

FORMS = f"the name {DEFAULT_MODEL.name}, a .gguf file, or a folder with config.json and safetensors"


@dataclass(frozen=True)
class ModelRef:
    """Where a model lies on this machine."""

    kind: Literal["gguf", "folder"]
    path: Path  # the .gguf file or the folder
    name: str  # for answers and lists


def resolve(
    reference: str, *, fetch: bool = False, progress: Progress | None = None, weights: bool = True
) -> ModelRef:
    """Finds a model. Raises ConfigError where there is none, and what `pull` raises.

    fetch: pull the default model if the cache lacks it.
    weights: a folder must have them; without, they are made up.
    """
    if reference.lower() == DEFAULT_MODEL.name:
        return _default(fetch, progress)
    path = Path(reference).expanduser()
    try:
        if reference and path.is_dir():
            return _folder(path, weights)
        if path.is_file():
            return _file(path)
    except (OSError, ValueError) as e:  # a name too long, or with a null byte
        raise ConfigError("not a model reference", expected=FORMS, got=f"{e!s:.100}") from None
    if reference.count("/") == 1 and not reference.startswith((".", "/", "~")) and path.suffix != ".gguf":
        remedy = "models of a hub are not fetched: download the folder and give its path"
    else:
        remedy = "check the path"
    raise ConfigError("no such model", expected=FORMS, got=f"{reference!r:.200}", remedy=remedy)


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
    name = DEFAULT_MODEL.display_name if path.name == DEFAULT_MODEL.file_name else path.stem
    return ModelRef("gguf", path, name)


def _folder(path: Path, weights: bool) -> ModelRef:
    missing = [n for n in ("config.json", "tokenizer.json") if not (path / n).is_file()]
    if weights and not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        files = sorted(path.glob("*.gguf"))
        raise ConfigError(
            "the folder holds no whole model",
            expected="config.json, *.safetensors and tokenizer.json",
            got=f"no {', no '.join(missing)}",
            where=path,
            remedy=f"give the file {files[0]}" if files else "fetch the missing files",
        )
    return ModelRef("folder", path, path.resolve().name)
