"""pegainfer kernels build: compiles the CUDA kernels ahead of time; serving only loads them."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from pegainfer.contract.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, kw_only=True)
class KernelBuildFlags:
    arch: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Architectures such as 90a,120a; may be repeated; default: those of this machine's GPUs."
        },
    )
    ops: tuple[str, ...] = field(
        default=(),
        metadata={"help": "Only kernels of these ops, with commas; may be repeated; default: all."},
    )
    model: str = field(
        default="",
        metadata={
            "help": "Only kernels that steps of this model can launch: a folder with config.json, a .gguf "
            "file or a name of the hub; default: all."
        },
    )
    jobs: int = field(default=0, metadata={"help": "Compilers at a time; 0: one a core."})
    folder: str = field(
        default="",
        metadata={"help": "Where <arch>/ is made; default: the package's folder, else the user's cache."},
    )

    def __post_init__(self) -> None:
        if self.jobs < 0:
            raise ConfigError("jobs of a build", expected="0 or more", got=self.jobs, where="--jobs")
        if self.model and self.ops:
            raise ConfigError("a model's kernels and those of ops", expected="--model or --ops", got="both")


def build(*, ask: KernelBuildFlags) -> int:
    """Compile CUDA kernels for one or more GPU architectures. Needs nvcc 13, no GPU; redoes what changed."""
    from pegainfer.kernels.build import build_kernels

    folder = Path(ask.folder) if ask.folder else default_folder()
    archs, ops = listed(ask.arch) or own_archs(), listed(ask.ops)
    kernels = model_kernels(ask.model, archs) if ask.model else None
    manifests = build_kernels(archs, ops or None, folder, ask.jobs, _progress, kernels)
    for m in manifests:
        count = sum(len(u.variants) for u in m.units)
        print(f"sm_{m.arch}: {count} kernels in {len(m.units)} units, {folder / m.arch}")
    return 0


def model_kernels(reference: str, archs: list[str]) -> dict[str, set[str]]:
    """By architecture, every kernel that steps of a model can launch, whatever its KV cache holds, with LoRA
    adapters and without.

    Reads its config.json or GGUF header.

    Raises what finding and opening a model raise, ConfigError for an unknown architecture, UnsupportedError
    for a model that no kernel serves.
    """
    from pegainfer.app.config import EngineConfig
    from pegainfer.app.resolve import resolve
    from pegainfer.cli.plan import step_programs
    from pegainfer.cli.spec import EngineSpec
    from pegainfer.engine.config import SchedulerConfig
    from pegainfer.lower.cuda.target import Target, card_of

    found = resolve(reference, fetch=True, weights=False, text=False)
    load_format = "dummy" if found.path.is_dir() else "auto"
    targets = {arch: Target(card_of(arch)) for arch in archs}
    kernels: dict[str, set[str]] = {arch: set() for arch in archs}
    for lora, kv in itertools.product((False, True), ("auto", "fp8")):
        engine = EngineConfig(backend="cuda", load_format=load_format, enable_lora=lora, kv_dtype=kv)
        spec = EngineSpec(name=found.name, path=str(found.path), engine=engine, scheduler=SchedulerConfig())
        try:
            programs = step_programs(spec)
        except UnsupportedError:
            if not lora and kv == "auto":
                raise
            continue  # a line that serves no adapters, or no such cache
        for arch, target in targets.items():
            kernels[arch] |= programs.kernels(target)
    return kernels


def listed(given: tuple[str, ...]) -> list[str]:
    """'90a,120a' and repeated options as one list, each once."""
    return list(dict.fromkeys(part.strip() for text in given for part in text.split(",") if part.strip()))


def own_archs() -> list[str]:
    """Of the GPUs that the driver shows. Raises ConfigError where there is none."""
    from pegainfer.kernels.build import ARCHS
    from pegainfer.runtime.cuda.device import Device
    from pegainfer.runtime.cuda.driver import call, probe

    if (reason := probe()) is not None:
        raise ConfigError(
            "no GPU to compile kernels for", expected=" ".join(ARCHS), got=reason,
            remedy="or name one, to compile for another machine: --arch 90a",
        )  # fmt: skip
    found = []
    for ordinal in range(call("cuDeviceGetCount")):
        device = Device.open(ordinal)
        found.append(device.info.arch)
        device.close()
    return sorted(set(found))


def default_folder() -> Path:
    """The package's own folder where it can be written, else the user's cache."""
    from pegainfer.kernels.manifest import cubin_cache, package_folder

    folder = package_folder()
    return folder if os.access(folder if folder.exists() else folder.parent, os.W_OK) else cubin_cache()


def _progress(done: int, total: int, unit: str) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r\x1b[K[{done}/{total}] {unit}", end=end, file=sys.stderr, flush=True)
