"""`pegainfer kernels build` where no compiler runs: which architectures, where to, what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegainfer.cli.kernels import KernelBuildFlags, build, default_folder, own_archs
from pegainfer.contract.errors import ConfigError
from pegainfer.kernels.manifest import Manifest, cubin_cache, folders
from tests.support.fake_cuda import FakeCuda, fake_cuda


def test_without_arch_it_builds_for_the_gpus_it_sees() -> None:
    with fake_cuda(FakeCuda(devices=2)):
        assert own_archs() == ["90a"]
    with fake_cuda(FakeCuda(devices=0)), pytest.raises(ConfigError, match="--arch 90a"):
        own_archs()


def test_flags_reach_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def fake_build(*args: Any) -> list[Manifest]:
        asked.append(args[:4])
        return [Manifest("120a", "V13.0.0")]

    monkeypatch.setattr("pegainfer.kernels.build.build_kernels", fake_build)
    ask = KernelBuildFlags(arch=("120a, 90a", "120a"), ops=("rope",), jobs=2, folder=str(tmp_path))
    assert build(ask=ask) == 0
    assert asked == [(["120a", "90a"], ["rope"], tmp_path, 2)]
    with pytest.raises(ConfigError, match="--model or --ops"):
        KernelBuildFlags(ops=("rope",), model="folder")
    assert capsys.readouterr().out == f"sm_120a: 0 kernels in 0 units, {tmp_path / '120a'}\n"


def test_kernels_go_to_the_cache_where_the_package_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pegainfer.kernels.manifest.package_folder", lambda: tmp_path / "cubins")
    assert default_folder() == tmp_path / "cubins"
    monkeypatch.setattr("pegainfer.cli.kernels.os.access", lambda *_: False)
    monkeypatch.setenv("PEGAINFER_CACHE", str(tmp_path / "mine"))
    assert default_folder() == cubin_cache() == tmp_path / "mine" / "cubins"
    assert folders() == (tmp_path / "cubins", tmp_path / "mine" / "cubins")  # and are looked for there


def test_without_a_home_the_packages_kernels_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pegainfer.kernels.manifest.package_folder", lambda: tmp_path)
    monkeypatch.delenv("PEGAINFER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert folders() == (tmp_path,)


def test_bad_jobs_are_refused() -> None:
    with pytest.raises(ConfigError, match="--jobs"):
        KernelBuildFlags(jobs=-1)
