"""Memory that the control groups around a process leave, in both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.runtime.control_groups import available_memory

MIB = 1 << 20


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 4194304 kB\n")
    (tmp_path / "own").write_text("0::/user.slice/job\n")
    return tmp_path


def available(machine: Path) -> int:
    return available_memory(machine / "cgroup", machine / "own", machine / "meminfo")


def test_no_limit(machine: Path) -> None:
    assert available(machine) == 4096 * MIB
    write(machine / "cgroup/user.slice/job", memory__max="max", memory__current=MIB)
    assert available(machine) == 4096 * MIB


@pytest.mark.parametrize("where", ["", "user.slice", "user.slice/job"])
def test_the_tightest_group_on_the_way_counts(machine: Path, where: str) -> None:
    write(machine / "cgroup/user.slice", memory__max=3000 * MIB, memory__current=0)
    write(machine / "cgroup" / where, memory__max=400 * MIB, memory__current=100 * MIB)
    assert available(machine) == 300 * MIB


def test_cached_files_are_room(machine: Path) -> None:
    write(machine / "cgroup/user.slice/job", memory__max=400 * MIB, memory__current=350 * MIB,
          memory__stat=f"anon {50 * MIB}\ninactive_file {300 * MIB}")  # fmt: skip
    assert available(machine) == 350 * MIB


def test_a_soft_limit_counts(machine: Path) -> None:
    write(machine / "cgroup/user.slice/job", memory__max="max", memory__high=200 * MIB, memory__current=0)
    assert available(machine) == 200 * MIB


def test_version_1(machine: Path) -> None:
    (machine / "own").write_text("5:memory:/job\n4:cpu,cpuacct:/other\n")
    write(machine / "cgroup/memory/job", memory__limit_in_bytes=500 * MIB, memory__usage_in_bytes=100 * MIB)
    write(machine / "cgroup/memory/other", memory__limit_in_bytes=MIB, memory__usage_in_bytes=0)
    assert available(machine) == 400 * MIB


def test_a_group_beyond_its_limit_has_no_room(machine: Path) -> None:
    write(machine / "cgroup/user.slice/job", memory__max=MIB, memory__current=2 * MIB)
    assert available(machine) == 0
