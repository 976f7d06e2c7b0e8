"""The folder of the engine's socket where the temporary folder does not serve."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from pegainfer.cli import socket_folder
from pegainfer.contract.errors import ConfigError


def test_the_temporary_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    found = socket_folder.socket_folder()
    assert found.parent == short and stat.S_IMODE(found.stat().st_mode) == 0o700
    found.rmdir()
    short.rmdir()


@pytest.mark.parametrize("length", [100, 90])
def test_a_path_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    deep = tmp_path / ("x" * length)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    found = socket_folder.socket_folder()
    assert len(str(found / socket_folder.SOCKET_NAME).encode()) <= socket_folder.MAX_SOCKET_BYTES
    found.rmdir()


def test_no_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_folder, "_parents", lambda: iter([Path("/proc"), Path("/" + "x" * 100)]))
    with pytest.raises(ConfigError, match=r"no folder for the socket.*too long.*set TMPDIR"):
        socket_folder.socket_folder()
