"""Compiles kernels/cuda/**.cu and kernels/triton/*/*.py to cubins ahead of time: no GPU needed, in parallel,
only what has changed.

A cubin's name contains the hash of its inputs, and the manifest is replaced when all cubins exist. So a build
that fails or is killed leaves the previous manifest and its cubins intact.

A source says at its head which ops it serves (`// op rms_norm, …: …`) and before each kernel what the kernel
supports (`// variant name: key=value …`). In Triton the lines begin with `#`, and each variant becomes a
cubin of its own. Sources in cuda/common/ and triton/ are compiled for every architecture, those in
cuda/sm<NN>/ for the one that they are named after.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from pegainfer.kernels.manifest import KernelsError, Manifest, Unit, Variant, sole_build, usable_units
from pegainfer.kernels.triton.aot import TRITON, check_triton, compile_triton

ROOT = Path(__file__).parent / "cuda"
COMPILE_TRITON = Path(__file__).parent / "triton" / "compile.py"
ARCHS = ("80", "86", "89", "90a", "100a", "120a")
FLAGS = (
    "-O3",
    "-std=c++17",
    "-cubin",
    "-Xptxas",
    "-v",
    "--expt-relaxed-constexpr",
    "-Werror",
    "all-warnings",
)
Progress = Callable[[int, int, str], None]  # units done, units in all, the one just done

_OP = re.compile(r"^(?://|#) op ([\w, ]+):", re.M)
_VARIANT = re.compile(r"^(?://|#) variant (\w+):(.*)$", re.M)
_FEATURE = re.compile(r"(\w+)=(\S+)")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
    re.S,
)


@dataclass(frozen=True)
class Source:
    """A .cu file and what it declares, or one variant of a Triton file."""

    path: Path
    ops: tuple[str, ...]
    variants: dict[str, dict[str, str]]  # kernel -> features

    @property
    def triton(self) -> bool:
        return self.path.suffix == ".py"

    @property
    def name(self) -> str:
        """As the manifest has it: 'common/norm/rms_norm.cu', 'triton/<family>/<file>.py:<variant>'."""
        if not self.triton:
            return self.path.relative_to(ROOT).as_posix()
        return f"{self.path.relative_to(ROOT.parent).as_posix()}:{next(iter(self.variants))}"

    def cubin(self, digest: str) -> str:
        """Its file beside the manifest. `digest` is of source_hash."""
        return self.name.removesuffix(".cu").replace(".py:", ".").replace("/", ".") + f".{digest}.cubin"

    def serves(self, arch: str) -> bool:
        folder = self.name.split("/")[0]
        return folder in ("common", "triton") or folder == f"sm{arch.rstrip('a')}"


def find_sources(ops: Iterable[str] | None = None) -> list[Source]:
    """Every source, or those that serve one of `ops`. Raises KernelsError where declarations are missing."""
    found = [read_source(path) for path in sorted(ROOT.rglob("*.cu"))]
    for path in sorted((ROOT.parent / "triton").glob("*/[!_]*.py")):
        whole = read_source(path)
        found += [Source(path, whole.ops, {name: f}) for name, f in whole.variants.items()]
    if ops is None:
        return found
    wanted = set(ops)
    if unknown := wanted - {op for s in found for op in s.ops}:
        raise KernelsError("no CUDA kernels for these ops", got=" ".join(sorted(unknown)))
    return [s for s in found if wanted & set(s.ops)]


def source_path(name: str) -> Path:
    """The file of a Source.name."""
    return ROOT.parent / name.split(":")[0] if name.startswith("triton/") else ROOT / name


def read_source(path: Path) -> Source:
    text = path.read_text()
    op = _OP.search(text)
    variants = {name: dict(_FEATURE.findall(features)) for name, features in _VARIANT.findall(text)}
    if op is None or not variants:
        raise KernelsError("kernel source without '// op …:' or '// variant …:' lines", where=path)
    return Source(path, tuple(o.strip() for o in op[1].split(",")), variants)


def find_compiler() -> Path:
    """nvcc on PATH, under CUDA_HOME, or of the nvidia-cuda-nvcc wheel. Raises KernelsError."""
    if found := shutil.which("nvcc"):
        return Path(found)
    places = [
        Path(home) / "bin" / "nvcc" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home
    ]
    spec = importlib.util.find_spec("nvidia")
    places += (
        [Path(p) / "cu13" / "bin" / "nvcc" for p in (spec.submodule_search_locations or ())] if spec else []
    )
    for place in places:
        if os.access(place, os.X_OK):
            return place
    raise KernelsError(
        "no CUDA compiler", expected="nvcc 13", got=f"none on PATH nor at {', '.join(map(str, places))}",
        remedy="pip install 'pegainfer[kernels]', or install the CUDA 13 toolkit",
    )  # fmt: skip


def compiler_version(nvcc: Path) -> str:
    """E.g. 'V13.0.88'. Raises KernelsError where nvcc does not run or is older than 13."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        raise KernelsError(f"nvcc does not run: {e}", where=nvcc) from None
    version = re.search(r"V(\d+)\.\d+\.\d+", text)
    if version is None or int(version[1]) < 13:
        raise KernelsError("the CUDA compiler is too old", expected="13.0 or newer", got=text.split("\n")[-2])
    return version[0]


def source_hash(source: Source, arch: str, compiler: str) -> str:
    """Hash of the source, all headers that it includes, the flags and the compiler."""
    if source.triton:
        features = json.dumps(source.variants, sort_keys=True)
        digest = hashlib.sha256(" ".join((arch, TRITON, features)).encode())
        digest.update(_VARIANT.sub("", source.path.read_text()).encode())
        digest.update(COMPILE_TRITON.read_bytes())
        return digest.hexdigest()[:16]
    digest = hashlib.sha256(" ".join((arch, compiler, *FLAGS)).encode())
    seen: set[Path] = set()
    todo = [source.path]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        digest.update(path.read_bytes())
        for name in sorted(_INCLUDE.findall(path.read_text())):
            places = (path.parent / name, ROOT / "include" / name)
            todo += [p for p in places if p.exists()][:1]
    return digest.hexdigest()[:16]


def stale_units(manifest: Manifest) -> list[str]:
    """Compiled sources that have changed since, themselves or a header of theirs."""
    units = {u.source: u.hash for u in manifest.units}
    found = [s for s in find_sources() if s.name in units]
    return [s.name for s in found if units[s.name] != source_hash(s, manifest.arch, manifest.compiler)]


def build_kernels(
    archs: Sequence[str],
    ops: Iterable[str] | None,
    out: Path,
    jobs: int = 0,
    progress: Progress | None = None,
    kernels: Mapping[str, Set[str]] | None = None,
) -> list[Manifest]:
    """Brings out/<arch>/ up to date for each architecture and returns the manifests.

    Args:
        archs: of ARCHS.
        ops: the ops that the chosen model lines use; None for all. Units built before for others stay.
        jobs: compilers at a time; 0: one a core.
        progress: called on this thread after each unit, fresh or compiled.
        kernels: by architecture, those of which a unit must have one; None for all.

    Raises KernelsError: unknown architecture, no compiler, or the compiler's own words for a source that
    does not compile.
    """
    if unknown := [a for a in archs if a not in ARCHS]:
        raise KernelsError("unknown architecture", expected=" ".join(ARCHS), got=" ".join(unknown))
    sources = find_sources(ops)
    nvcc = find_compiler()
    compiler = compiler_version(nvcc)
    if any(s.triton for s in sources):
        check_triton()
    work = [
        (arch, s)
        for arch in archs
        for s in sources
        if s.serves(arch) and (kernels is None or not kernels[arch].isdisjoint(s.variants))
    ]

    def report_progress(count: int, what: str) -> None:
        if progress is not None:
            progress(count, len(work), what)

    before: dict[str, dict[str, Unit]] = {}
    done: dict[str, dict[str, Unit]] = {arch: {} for arch in archs}
    with sole_build(out, lambda: report_progress(0, "waiting for another build")):
        for arch in archs:
            (out / arch).mkdir(exist_ok=True)
            before[arch] = {u.source: u for u in usable_units(out / arch)}
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            futures = {
                pool.submit(build_unit, s, a, out / a, nvcc, compiler, before[a].get(s.name)): (a, s)
                for a, s in work
            }
            try:
                for count, future in enumerate(as_completed(futures), 1):
                    arch, source = futures[future]
                    done[arch][source.name] = future.result()
                    report_progress(count, f"{source.name} sm_{arch}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [finish(arch, compiler, before[arch], done[arch], out / arch) for arch in archs]


def finish(
    arch: str, compiler: str, before: dict[str, Unit], done: dict[str, Unit], folder: Path
) -> Manifest:
    """Writes the manifest: new units, and older ones whose source still exists. Removes files that the
    manifest does not name: older cubins, and leftovers of failed builds.
    """
    kept = {n: u for n, u in before.items() if source_path(n).exists() and (folder / u.cubin).exists()}
    units = tuple(u for _, u in sorted((kept | done).items()))
    manifest = Manifest(arch, compiler, units)
    manifest.write(folder)
    named = {u.cubin for u in units}
    for path in (*folder.glob("*.cubin*"), *folder.glob("manifest.json.*")):
        if path.name not in named:
            path.unlink()
    return manifest


def build_unit(source: Source, arch: str, folder: Path, nvcc: Path, compiler: str, old: Unit | None) -> Unit:
    """Compiles one source, unless `old` was made from the same inputs."""
    digest = source_hash(source, arch, compiler)
    if old is not None and old.hash == digest and (folder / old.cubin).exists():
        return old
    cubin = source.cubin(digest)
    temporary = folder / f"{cubin}.{os.getpid()}"
    if source.triton:
        ((name, features),) = source.variants.items()
        variants: tuple[Variant, ...] = (compile_triton(source.path, name, features, arch, temporary),)
    else:
        variants = compile_cuda(source, arch, temporary, nvcc)
    if source_hash(source, arch, compiler) != digest:
        temporary.unlink()
        raise KernelsError(
            f"{source.name} or a header of its has changed while it was compiled",
            remedy="run: pegainfer kernels build",
        )
    temporary.replace(folder / cubin)
    return Unit(source.name, source.ops, cubin, digest, variants)


def compile_cuda(source: Source, arch: str, out: Path, nvcc: Path) -> tuple[Variant, ...]:
    """Writes the cubin of one .cu file. Raises KernelsError with the compiler's words."""
    target = f"arch=compute_{arch},code=sm_{arch}"
    command = [str(nvcc), *FLAGS, "-gencode", target, "-I", str(ROOT / "include"), "-o", str(out)]
    result = subprocess.run([*command, str(source.path)], capture_output=True, text=True)
    if result.returncode:
        out.unlink(missing_ok=True)
        raise KernelsError(
            f"{source.name} does not compile for sm_{arch}:\n{result.stderr.strip()}", where=nvcc
        )
    return read_report(result.stderr, source)


def read_report(report: str, source: Source) -> tuple[Variant, ...]:
    """The assembler's figures for each declared kernel. Raises KernelsError where the two lists differ."""
    figures = {m[1]: m for m in _ENTRY.finditer(report)}
    if set(figures) != set(source.variants):
        differ = sorted(set(figures) ^ set(source.variants))
        raise KernelsError(
            "kernels and their '// variant' lines differ", got=" ".join(differ), where=source.name
        )
    return tuple(
        Variant(
            name, features, int(figures[name][5]), int(figures[name][6] or 0), int(figures[name][2]),
            int(figures[name][3]) + int(figures[name][4]),
        )
        for name, features in source.variants.items()
    )  # fmt: skip
