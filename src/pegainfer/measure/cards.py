"""Devices that steps are priced on: those that the ledger has rows of, and cards by their data sheets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pegainfer.contract.errors import ConfigError
from pegainfer.kernels.build import find_sources
from pegainfer.kernels.cpu.library import SOURCES, source_hash
from pegainfer.lower.cpu.backend import Activation
from pegainfer.lower.cpu.encode import lowered
from pegainfer.lower.cuda.lowering import keeps_whole
from pegainfer.lower.cuda.planning import SUPPORT
from pegainfer.measure.cpu.variant import arithmetic_of
from pegainfer.measure.ledger import Roofline, Row
from pegainfer.measure.op_prices import Origin
from pegainfer.measure.prices import Pad, PriceList, scaled
from pegainfer.measure.workload import Family
from pegainfer.ops.program import Program

LIBRARY = "cublaslt"  # a kernel's name in the ledger where cuBLASLt ran


@dataclass(frozen=True)
class DataSheet:
    """What a maker says of a card.

    Args:
        gb_s: memory bandwidth, 10⁹ bytes a second.
        bf16: dense tensor-core 10⁹ operations a second with float32 sums.
        f32: 10⁹ operations a second without tensor cores.
        memory: bytes.
    """

    gb_s: float
    bf16: float
    f32: float
    memory: int


# NVIDIA's data sheets and architecture papers: H100, H200 and A100 (SXM), GeForce RTX 4090 and 5090, L4.
DATA_SHEETS = {
    "H100": DataSheet(3350, 989_400, 66_900, 80 << 30),
    "H200": DataSheet(4800, 989_400, 66_900, 141 << 30),
    "A100": DataSheet(2039, 312_000, 19_500, 80 << 30),
    "4090": DataSheet(1008, 165_200, 82_600, 24 << 30),
    "5090": DataSheet(1792, 209_500, 104_800, 32 << 30),
    "L4": DataSheet(300, 121_000, 30_300, 24 << 30),
}
REFERENCE = "H100"  # the card whose rows are scaled to others


@dataclass(frozen=True)
class PricedDevice:
    """A device and the rows that price it.

    Args:
        name: as the ledger or the data sheet has it.
        known: what its prices at measured sizes are called.
        memory: bytes of a card; 0 on a CPU, whose memory is this machine's.
        notes: what a reader must know: a data sheet, rows of sources that have changed.
    """

    name: str
    cuda: bool
    rows: tuple[Row, ...]
    roofline: Roofline
    known: Origin
    memory: int
    notes: tuple[str, ...]

    def prices(
        self,
        forward: Program,
        sampler: Program,
        case: str,
        pad: Pad | None = None,
        activation: Activation = "bf16",
    ) -> PriceList:
        """Prices of a model's steps.

        Args:
            forward, sampler: as recorded.
            case: a setting of `sample_tokens`.
            pad: as PriceList has it.
            activation: on a CPU, see variant.arithmetic_of.
        """

        def cpu_arithmetic(family: Family) -> str:
            return arithmetic_of(family.spec, family.dtypes, activation)

        if self.cuda:
            forward, sampler = (p.lowered(keep=keeps_whole) for p in (forward, sampler))
        else:
            forward, sampler = lowered(forward), lowered(sampler)
        return PriceList(
            forward,
            sampler,
            self.rows,
            self.roofline,
            arithmetic=_cuda_arithmetic if self.cuda else cpu_arithmetic,
            case=case,
            known=self.known,
            **({} if pad is None else {"pad": pad}),
        )


def _cuda_arithmetic(family: Family) -> str:
    return "bf16" if "bf16" in family.dtypes.values() else "f32"


def priced_card(name: str, rows: Sequence[Row]) -> PricedDevice:
    """A card by a part of its name, measured where the ledger has it, else by its data sheet.

    Raises ConfigError for a card that neither knows, and where the ledger has no card to scale from.
    """
    short = next((known for known in DATA_SHEETS if known.lower() in name.lower()), None)
    own = _newest_device(
        [r for r in rows if r.variant.startswith("cuda") and name.lower() in r.device.lower()]
    )
    if own:
        memory = DATA_SHEETS[short].memory if short else 0
        if not memory:
            raise ConfigError("the card's memory is unknown", got=own[0].device, expected=_known_cards())
        roofline = _best(own)
        return PricedDevice(own[0].device, True, own, roofline, "measured", memory, _stale(own))
    if short is None:
        raise ConfigError("no such card", expected=_known_cards(), got=name, where="--card")
    like = _newest_device([r for r in rows if r.variant.startswith("cuda") and REFERENCE in r.device])
    if not like:
        raise ConfigError(f"the ledger has no rows of an {REFERENCE}, which other cards are scaled from")
    sheet, from_sheet, measured = DATA_SHEETS[short], DATA_SHEETS[REFERENCE], _best(like)
    memory_ratio = sheet.gb_s / from_sheet.gb_s
    peaks = {"bf16": sheet.bf16 / from_sheet.bf16, "f32": sheet.f32 / from_sheet.f32}
    roofline = Roofline(
        read_gb_s=measured.read_gb_s * memory_ratio,
        cache_gb_s=measured.cache_gb_s * memory_ratio,
        peaks={kind: measured.peaks[kind] * ratio for kind, ratio in peaks.items()},
        launch_us=measured.launch_us,
    )
    note = (
        f"{short}: not measured; prices are those of {like[0].device}, scaled by the data sheets' ratios of "
        "bandwidth and arithmetic"
    )
    return PricedDevice(
        f"{short} (data sheet)", True, tuple(scaled(like, roofline, short)), roofline, "scaled", sheet.memory,
        (note, *_stale(like)),
    )  # fmt: skip


def priced_cpu(rows: Sequence[Row]) -> PricedDevice:
    """The CPU that was measured last. Raises ConfigError where none was."""
    own = _newest_device([r for r in rows if r.variant.startswith("cpu")])
    if not own:
        raise ConfigError("the ledger has no rows of a CPU", remedy="pegainfer bench ops --append")
    isa = max(own, key=lambda r: r.date).variant.split(".")[1]
    own = tuple(r for r in own if r.variant.split(".")[1] == isa)
    return PricedDevice(own[0].device, False, own, _best(own), "measured", 0, _stale(own))


def _known_cards() -> str:
    return " ".join(DATA_SHEETS)


def _newest_device(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows of the device and thread count that was measured last."""
    if not rows:
        return ()
    last = max(rows, key=lambda r: r.date)
    return tuple(r for r in rows if (r.device, r.threads) == (last.device, last.threads))


def _best(rows: Iterable[Row]) -> Roofline:
    """The ceilings of the last run."""
    return max(rows, key=lambda r: r.date).roofline


def _stale(rows: Iterable[Row]) -> tuple[str, ...]:
    """Notes on rows whose kernels have changed or gone since they were measured."""
    here = {name for source in find_sources() for name in source.variants} | SUPPORT | {LIBRARY}
    digest = source_hash()[:12] if SOURCES.is_dir() else None  # None: nothing to compare with
    changed: dict[str, list[str]] = {}
    for row in rows:
        gone = sorted({k for k in (*row.kernels, *row.step_kernels) if k not in here})
        if row.variant.startswith("cpu") and digest is not None and row.source != digest:
            changed.setdefault(f"the CPU kernels' sources changed after commit {row.commit}", []).append(
                row.op
            )
        elif gone:
            reason = f"kernels that are no longer there since commit {row.commit}: {', '.join(gone)}"
            changed.setdefault(reason, []).append(row.op)
    return tuple(
        f"stale prices: {len(ops)} rows of {', '.join(dict.fromkeys(ops))}; {reason}"
        for reason, ops in changed.items()
    )
