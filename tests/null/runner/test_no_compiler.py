"""Serving starts no compiler: seen in an interpreter that has done nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_kernels import write_kernels
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3

ROOT = Path(__file__).parents[3]
MODEL = TinyQwen3("watched", seed=5, dtype="bf16", config={"head_dim": 64})
# Packages that compile at run time or bring a framework; libraries that compile or assemble in the process.
PACKAGES = {"triton", "torch", "numba", "cupy", "pycuda", "tvm", "llvmlite", "jax", "tensorflow"}
LIBRARIES = ("nvrtc", "nvjitlink", "nvvm", "ptxcompiler", "llvm")


def watched(backend: str, folder: Path) -> dict[str, Any]:
    """What tests.support.watched_steps prints."""
    command = [sys.executable, "-m", "tests.support.watched_steps", backend, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_serving_starts_no_compiler(backend: str, tmp_path: Path) -> None:
    write_checkpoint(MODEL, tmp_path)
    write_kernels(tmp_path / "kernels")
    seen = watched(backend, tmp_path)
    assert seen["tokens"] == 2
    assert seen["started"] == []
    assert not PACKAGES & {name.split(".")[0] for name in seen["modules"]}
    assert not [lib for lib in seen["libraries"] if any(word in lib.lower() for word in LIBRARIES)]
