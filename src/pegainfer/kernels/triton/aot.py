"""Runs Triton's compiler in processes of their own; this side of it imports nothing of Triton."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pegainfer.kernels.manifest import KernelsError, Variant

TRITON = "3.6.0"  # its assembler and its language change between versions
COMPILE = "pegainfer.kernels.triton.compile"


def check_triton() -> None:
    """Raises KernelsError where Triton is not installed, or another version of it."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != TRITON:
        raise KernelsError(
            "no Triton of the version that the kernels are written for", expected=TRITON, got=version,
            remedy="pip install 'pegainfer[kernels]'",
        )  # fmt: skip


def compile_triton(path: Path, name: str, features: Mapping[str, str], arch: str, out: Path) -> Variant:
    """Writes the cubin of one variant. Its features gain `shared`: dynamic bytes that a launch asks for.

    Raises KernelsError with the compiler's words.
    """
    words = [f"{key}={value}" for key, value in features.items()]
    command = [sys.executable, "-m", COMPILE, str(path), name, arch, str(out), *words]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        out.unlink(missing_ok=True)
        raise KernelsError(f"{name} does not compile for sm_{arch}:\n{result.stderr.strip()}", where=path)
    report = json.loads(result.stdout)
    features = {**features, "shared": str(report["dynamic"])}
    return Variant(name, features, report["registers"], report["shared"], report["stack"], report["spills"])
