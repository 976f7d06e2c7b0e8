"""The manifest of compiled kernels, one for each architecture, and the folders that hold cubins."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pegainfer.contract.errors import ConfigError, PegaError
from pegainfer.runtime.user_cache import cache_folder

MANIFEST = "manifest.json"
LOCK = ".lock"
VERSION = 1  # of the manifest's form


class KernelsError(PegaError):
    """Kernels that cannot be built, or were not built for this GPU."""


@dataclass(frozen=True)
class Variant:
    """One kernel. `features` is what its source declares; the rest is what the assembler reports."""

    name: str
    features: dict[str, str]
    registers: int
    shared: int  # bytes, static
    stack: int  # bytes
    spills: int  # bytes, stores and loads


@dataclass(frozen=True)
class Unit:
    """One compiled source file."""

    source: str  # relative to kernels/cuda
    ops: tuple[str, ...]
    cubin: str  # file name beside the manifest
    hash: str  # of source, headers, flags and compiler
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Manifest:
    """All units of one architecture."""

    arch: str
    compiler: str
    units: tuple[Unit, ...] = ()
    version: int = field(default=VERSION)

    def variant(self, name: str) -> tuple[Unit, Variant] | None:
        for unit in self.units:
            for v in unit.variants:
                if v.name == name:
                    return unit, v
        return None

    @property
    def ops(self) -> dict[str, tuple[Variant, ...]]:
        """Variants by the op they serve."""
        out: dict[str, tuple[Variant, ...]] = {}
        for unit in self.units:
            for op in unit.ops:
                out[op] = out.get(op, ()) + unit.variants
        return out

    def write(self, folder: Path) -> None:
        """Replaces the file at once, so that a reader never sees half of it."""
        temporary = folder / f"{MANIFEST}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")
        temporary.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest | None:
    """None where there is none. Raises KernelsError for one that another version wrote or that is broken."""
    path = folder / MANIFEST
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        if raw["version"] != VERSION:
            raise KernelsError(
                "kernels were built by another version", expected=VERSION, got=raw["version"], where=path,
                remedy="run: pegainfer kernels build",
            )  # fmt: skip
        units = tuple(
            Unit(
                u["source"], tuple(u["ops"]), u["cubin"], u["hash"],
                tuple(Variant(**v) for v in u["variants"]),
            )
            for u in raw["units"]
        )  # fmt: skip
        return Manifest(raw["arch"], raw["compiler"], units)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as e:
        raise KernelsError(
            f"kernel manifest is broken: {e}", where=path, remedy="run: pegainfer kernels build"
        ) from None


def usable_units(folder: Path) -> tuple[Unit, ...]:
    """The manifest's; none of a missing or broken one, so that a build compiles everything anew."""
    try:
        manifest = read_manifest(folder)
    except KernelsError:
        return ()
    return manifest.units if manifest else ()


@contextlib.contextmanager
def sole_build(out: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Holds the right to write below `out`, which it makes; a killed process loses it with its life.

    waits: called where another build has it, before waiting for its end.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("wb") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield


def package_folder() -> Path:
    """Where an installed package and a checkout keep cubins: <here>/<arch>/."""
    return Path(__file__).parent / "cubins"


def cubin_cache() -> Path:
    """Where cubins go if the package's own folder cannot be written. Raises ConfigError."""
    return cache_folder() / "cubins"


def folders() -> tuple[Path, ...]:
    """In the order of the search."""
    try:
        return package_folder(), cubin_cache()
    except ConfigError:  # there is no home, and so no cache
        return (package_folder(),)
