"""Manifests of every kernel source, as a build would write them, without cubins worth the name."""

from __future__ import annotations

from pathlib import Path

from pegainfer.kernels.build import find_sources
from pegainfer.kernels.manifest import Manifest, Unit, Variant


def write_kernels(folder: Path, arch: str = "90a") -> Path:
    """Returns `folder`, which then has <arch>/manifest.json and empty cubins."""
    (folder / arch).mkdir(parents=True)
    units = []
    for source in find_sources():
        if source.serves(arch):
            cubin = source.cubin("0" * 16)
            (folder / arch / cubin).write_bytes(b"\0")
            variants = tuple(Variant(n, f, 32, 0, 0, 0) for n, f in source.variants.items())
            units.append(Unit(source.name, source.ops, cubin, "0" * 16, variants))
    Manifest(arch, "V13.0.0", tuple(units)).write(folder / arch)
    return folder


class FakeLt:
    """A matrix library that multiplies nothing: stands in for lower.cuda.context.CublasLt."""

    def plan(self, problem: object) -> FakeLt:
        return self

    def tune(self, *operands: object) -> None: ...

    def run(self, *operands: object) -> None: ...

    def close(self) -> None: ...
