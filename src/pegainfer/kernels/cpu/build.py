"""Builds the C++ library in place: `python -m pegainfer.kernels.cpu.build`. Redoes only what changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from pegainfer.contract.errors import UnsupportedError
from pegainfer.kernels.cpu.library import LIBRARY

ROOT = Path(__file__).resolve().parents[4]  # of a checkout
BUILD_DIR = ROOT / "build" / "cpu"


def build() -> Path:
    """Configures if need be, compiles, and returns the library's path.

    Raises UnsupportedError outside a checkout, without cmake, or where the compiler fails.
    """
    if not (ROOT / "CMakeLists.txt").is_file():
        raise UnsupportedError(
            "the C++ library is built from a checkout", got=ROOT, remedy="pip install pegainfer brings it"
        )
    cmake = _tool("cmake")
    if cmake is None:
        raise UnsupportedError("cmake is missing", remedy="pip install cmake ninja")
    if not (BUILD_DIR / "CMakeCache.txt").is_file():
        ninja = _tool("ninja")
        how = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        _run([cmake, "-S", str(ROOT), "-B", str(BUILD_DIR), *how])
    _run([cmake, "--build", str(BUILD_DIR), "--parallel"])
    return LIBRARY


def _tool(name: str) -> str | None:
    """A program beside this Python (pip's cmake and ninja), else on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(
            f"building the C++ library failed:\n{done.stdout}{done.stderr}", got=" ".join(command)
        )


if __name__ == "__main__":
    try:
        print(build())
    except UnsupportedError as e:
        print(e, file=sys.stderr)
        sys.exit(2)
