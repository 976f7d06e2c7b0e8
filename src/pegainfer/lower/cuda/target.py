"""What the choice of a kernel depends on, apart from op and sizes: the card, the compiled kernels,
measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from pegainfer.contract.errors import ConfigError
from pegainfer.kernels.manifest import KernelsError, Manifest
from pegainfer.runtime.cuda.device import ARCHS, DeviceInfo

REGISTERS = 1 << 16  # of an SM
SYSTEM = 1 << 10  # bytes of an SM's shared memory that the system takes for each block
THREADS = {(8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # of an SM; 2048 on others
DATA = "cards.json"


@dataclass(frozen=True)
class Tuned:
    """One measurement of cards.json.

    Args:
        card: as the driver names it.
        shape: sizes that must be equal; none for numbers that hold for every shape.
        most: the most rows (tokens) that it is for.
        numbers: the fastest choice; None where the library was faster.
    """

    card: str
    arch: str
    op: str
    shape: Mapping[str, int]
    most: int
    numbers: Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class Tuning:
    """Measured numbers by op and shape, for cards."""

    rows: tuple[Tuned, ...] = ()

    def find(self, info: DeviceInfo, op: str, rows: int = 0, **shape: int) -> Tuned | None:
        """The measurement for the fewest rows that are enough; None for a shape that was never measured.

        A card without measurements of its own takes those of its architecture.
        """
        alike = [r for r in self.rows if (r.op, r.arch) == (op, info.arch) and dict(r.shape) == shape]
        own = [r for r in alike if r.card == info.name] or alike
        return min((r for r in own if rows <= r.most), key=lambda r: r.most, default=None)

    def numbers(self, info: DeviceInfo, op: str) -> Mapping[str, Any]:
        """Numbers of an op that hold for every shape. Raises ConfigError where the data lack them."""
        found = self.find(info, op)
        if found is None or found.numbers is None:
            raise ConfigError(f"{DATA} has no numbers of {op}", expected=f"a row of sm_{info.arch}")
        return found.numbers


@cache
def _packaged() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(files(__package__).joinpath(DATA).read_text())
    return data


def packaged_registers(arch: str) -> Mapping[str, int]:
    """Registers of a thread, for the kernels of which registers limit the blocks that an SM runs."""
    registers: Mapping[str, int] = _packaged()["registers"][arch]
    return registers


@cache
def packaged_tuning() -> Tuning:
    """What ships with the package."""
    return Tuning(
        tuple(
            Tuned(
                card["name"], ARCHS[tuple(card["capability"])], r["op"], r.get("shape", {}), r.get("most", 0),
                r["numbers"],
            )
            for card in _packaged()["cards"]
            for r in card.get("tuned", ())
        )
    )  # fmt: skip


def card_of(arch: str) -> DeviceInfo:
    """A card of an architecture, as its maker describes it, for plans without a GPU. Raises ConfigError."""
    for card in _packaged()["cards"]:
        capability = tuple(card["capability"])
        if ARCHS[capability] == arch:
            shared = card["shared_kib"] << 10
            return DeviceInfo(
                ordinal=0,
                name=card["name"],
                capability=capability,
                num_sms=card["num_sms"],
                l2_bytes=card["l2_mib"] << 20,
                max_shared=shared,
                shared_per_sm=shared + SYSTEM,
                total_memory=card["memory_gib"] << 30,
                driver=13000,
                clusters=card["clusters"],
            )
    raise ConfigError("no such architecture", expected=" ".join(ARCHS.values()), got=arch, where="--arch")


@cache
def declared_kernels() -> Mapping[str, Mapping[str, str]]:
    """Features of every kernel, from the sources."""
    from pegainfer.kernels.build import find_sources  # serving needs no compiler

    return {name: features for s in find_sources() for name, features in s.variants.items()}


@dataclass(frozen=True, eq=False)
class Target:
    """A card, its kernels, and measurements.

    Args:
        kernels: declared features by kernel.
        registers: of a thread, by kernel, where they have been compiled; None: those of cards.json, which has
            the kernels that fewer blocks of an SM can run for want of registers.
        ranks: of the group that computes each step; sums over ranks are no part of other calls then.
        rank: of this card.
    """

    info: DeviceInfo
    kernels: Mapping[str, Mapping[str, str]] = field(default_factory=declared_kernels)
    registers: Mapping[str, int] | None = None
    tuning: Tuning = field(default_factory=packaged_tuning)
    ranks: int = 1
    rank: int = 0

    @classmethod
    def of(cls, info: DeviceInfo, manifest: Manifest, ranks: int = 1, rank: int = 0) -> Target:
        """The target of a card and the manifest of its compiled kernels."""
        variants = [v for unit in manifest.units for v in unit.variants]
        features = {v.name: v.features for v in variants}
        return cls(info, features, {v.name: v.registers for v in variants}, ranks=ranks, rank=rank)

    def feature(self, kernel: str, name: str) -> int | None:
        """A number that the kernel's source declares. Raises KernelsError for a kernel that is not there."""
        features = self.kernels.get(kernel)
        if features is None:
            raise KernelsError(
                f"kernel {kernel} was not built for sm_{self.info.arch}",
                remedy=f"run: pegainfer kernels build --arch {self.info.arch}",
            )
        return int(features[name]) if name in features else None

    def blocks_per_sm(self, kernel: str, threads: int, shared: int) -> int:
        """Blocks that an SM runs together, by the rule of the CUDA occupancy calculator."""
        limits = [
            THREADS.get(self.info.capability, 2048) // threads,
            self.info.shared_per_sm // (shared + SYSTEM),
        ]
        known = packaged_registers(self.info.arch) if self.registers is None else self.registers
        if registers := known.get(kernel, 0):  # A warp takes them 256 at a time, of its quarter of the SM.
            of_a_warp = -(-registers * 32 // 256) * 256
            limits.append(REGISTERS // 4 // of_a_warp * 4 // -(-threads // 32))
        return max(1, min(limits))
