"""pegainfer doctor: what this machine can do, what a step would run, and where a device goes wrong."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from pegainfer import __version__
from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.target import MODEL_HELP, ModelFlags, Target, choose, load_text_side
from pegainfer.contract.errors import ConfigError, PegaError, UnsupportedError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.cli.bisect import Difference

SAMPLE_TEXT = "The quick brown fox jumps over the lazy dog, and 42 of its friends look on."
DISK = "--kv-offload-disk"
BISECT_TOKENS = 4  # decoded after the prompt, so that both kinds of step are compared
# Relative error of one op's output that counts as wrong, by activations: float32 sums in another order differ
# by some 1e-6 an op, and errors add up over the layers; int8 rounds each activation to 1 of 127 steps;
# bf16 on a GPU rounds to 1 of 256, and every op starts from the device's own inputs.
BISECT_BOUNDS = {"f32": 1e-3, "int8": 0.3, "cuda": 2e-2}


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    plan: bool = field(
        default=False, metadata={"help": "Print the recorded program of a step: ops, bytes, FLOPs, arena."}
    )
    bisect: bool = field(
        default=False,
        metadata={"help": "Run device and reference side by side, op by op; the CPU in float32 unless told."},
    )
    tokens: int = field(default=1, metadata={"help": "With --plan: tokens of the step."})
    rows: int = field(default=1, metadata={"help": "With --plan: sequences of the step."})
    arch: str = field(
        default="",
        metadata={
            "help": "With --plan --device cuda: the architecture to list launches for, such as 90a; needs no "
            "GPU. Default: this machine's GPU."
        },
    )
    text: str = field(default=SAMPLE_TEXT, metadata={"help": "With --bisect: the prompt."})

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= self.tokens:
            raise ConfigError(
                "sizes of a step", expected="1 ≤ rows ≤ tokens", got=f"{self.rows}, {self.tokens}"
            )


def doctor(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    ask: DoctorFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    given: Given,
) -> int:
    """Say what this machine can do.

    Exits with 1 if something that serving needs is missing. With --kv-offload-disk, measures the folder of a
    disk tier. With --plan or --bisect, looks into one model.
    """
    if not (ask.plan or ask.bisect):
        ignored = [model] if model is not None else sorted(given - {"--plan", "--bisect", DISK})
        if ignored:
            raise ConfigError(
                "the machine's check takes no model and no flags",
                got=" ".join(ignored),
                remedy="add --plan or --bisect to look into a model, or leave it out",
            )
        lines = list(_machine(engine.kv_offload_disk))
        for name, state, _ in lines:
            print(f"{name:14} {state}")
        return int(not all(good for *_, good in lines))
    if ask.bisect and not {"--activation-dtype", "--device"} & given:
        engine = dataclasses.replace(engine, activation="f32")
    target = choose(model, flags, engine, scheduler, given, text=ask.bisect)
    if ask.plan:
        _print_plan(target, ask)
    return _bisect(target, ask.text) if ask.bisect else 0


def _machine(disk: str) -> Iterator[tuple[str, str, bool]]:
    """(what, how it is, whether that is good enough to serve). `disk`: kv_offload_disk."""
    from pegainfer.app.cache import DEFAULT_MODEL, cached_model
    from pegainfer.cli.links import copy_bandwidth
    from pegainfer.cli.machine import cpu_model, memory_bytes, num_cores, read_bandwidth
    from pegainfer.runtime.user_cache import cache_folder

    yield "pegainfer", f"{__version__}, Python {platform.python_version()}, {platform.platform()}", True
    cores = num_cores()
    yield "cpu", f"{cpu_model()}, {cores} cores usable, {memory_bytes() / 2**30:.1f} GiB of memory", True
    one, every = read_bandwidth(1), read_bandwidth(cores)
    yield "bandwidth", f"{one:.1f} GB/s read by one thread, {every:.1f} by {cores}", True
    yield "memory copy", f"{copy_bandwidth():.1f} GB/s by one thread", True
    if disk:
        yield "disk tier", *_disk(disk)
    try:
        from pegainfer.kernels.cpu.library import LIBRARY, isa_name, supported_isas

        has = " ".join(supported_isas())
        yield "cpu kernels", f"{isa_name()} chosen of {has}; {LIBRARY}", True
    except PegaError as error:
        yield "cpu kernels", f"MISSING: {error}", False
    yield "cuda", _gpu(), True
    for line in _links():
        yield "gpu links", line, True
    try:
        found = cached_model()
        where = found if found is not None else f"not in {cache_folder()}: run `pegainfer pull`"
        yield "default model", f"{DEFAULT_MODEL.display_name}: {where}", True
    except PegaError as error:
        yield "default model", f"MISSING: {error}", False


def _gpu() -> str:
    """The GPU and its kernels, or what is missing; serving on the CPU needs neither."""
    from pegainfer.app.gpu import describe, why_not

    engine = EngineConfig()
    reason = why_not(engine)
    return f"cannot be used: {reason}" if reason is not None else f"{describe(engine)}; {_gpu_link(engine)}"


def _gpu_link(engine: EngineConfig) -> str:
    """Bandwidths between the host's memory and the GPU's."""
    from pegainfer.cli.links import device_bandwidth

    try:
        up, down = device_bandwidth(engine.device_ordinal)
    except PegaError as error:
        return f"its link could not be measured: {error}"
    return f"{up:.1f} GB/s to it and {down:.1f} GB/s from it, page-locked memory"


def _disk(text: str) -> tuple[str, bool]:
    """Bandwidths of a disk tier's folder, and whether it can be used."""
    from pegainfer.app.tier_stores import parse_disk
    from pegainfer.cli.links import disk_bandwidth

    try:
        folder, _ = parse_disk(text)
        write, read = disk_bandwidth(folder)
    except PegaError as error:
        return f"MISSING: {error}", False
    return f"{folder}: {write:.2f} GB/s written, {read:.2f} GB/s read, checksums included", True


def _links() -> list[str]:
    """How several GPUs are linked."""
    from pegainfer.runtime.cuda.driver import probe
    from pegainfer.runtime.cuda.links import describe_links

    return [] if probe() is not None else describe_links()


def _print_plan(target: Target, ask: DoctorFlags) -> None:
    from pegainfer.cli.plan import step_programs

    engine = target.spec.engine
    if ask.arch and engine.backend != "cuda":
        raise ConfigError("only a GPU has an architecture", got=f"--arch {ask.arch}", remedy="--device cuda")
    programs = step_programs(target.spec)
    print(programs.describe(ask.tokens, ask.rows))
    largest = programs.largest
    print(f"\nThe arena is sized for the largest step, {largest['T']} tokens in {largest['R']} rows; a step "
          f"allocates nothing.")  # fmt: skip
    if engine.backend == "cuda":
        from pegainfer.app.gpu import kernel_target, why_not

        if not ask.arch and (reason := why_not(engine)) is not None:
            print(f"\nLaunches are listed for a GPU ({reason}), or for an architecture: --arch 90a")
            return
        card = kernel_target(engine, ask.arch)
        print(f"\nLaunches on {card.info.name}, sm_{card.info.arch}:")
        for plan in programs.launches(card, ask.tokens, ask.rows):
            print(f"\n{plan}")


def _bisect(target: Target, text: str) -> int:
    """Runs a prompt and some decoding on both sides and reports. Returns 1 if an op is beyond the bound."""
    engine = target.spec.engine
    if target.model is None or engine.backend == "reference":
        raise UnsupportedError(
            "this device is not compared with the reference", remedy="choose --device cpu or cuda"
        )
    ids = load_text_side(target).tokenizer.encode(text)
    if engine.backend == "cuda":
        from pegainfer.cli import bisect_cuda

        found, bound = bisect_cuda.compare(target.spec, ids, BISECT_TOKENS), BISECT_BOUNDS["cuda"]
    else:
        from pegainfer.cli import bisect

        found = bisect.compare(target.spec, ids, BISECT_TOKENS)
        bound = BISECT_BOUNDS["f32" if engine.activation == "f32" else "int8"]
    worst: dict[str, Difference] = {}
    for d in found:
        if d.op not in worst or d.error > worst[d.op].error:
            worst[d.op] = d
    print(f"{'op':22} {'worst':>9}  at")
    for op, d in worst.items():
        print(f"{op:22} {d.error:9.1e}  {d}")
    first = next((d for d in found if not d.error <= bound), None)
    if first is None:
        print(f"every output of {len(found)} is within {bound:.0e} of the reference")
        return 0
    print(f"FIRST WRONG: {first}; bound {bound:.0e}")
    return 1
