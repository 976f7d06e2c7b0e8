"""The kernel build: what sources declare, what is compiled anew, what a compiler's failure looks like."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pegainfer.kernels import build
from pegainfer.kernels.manifest import KernelsError, read_manifest, sole_build

# Stands in for nvcc: reports each kernel of the source as ptxas does, and notes that it ran.
COMPILER = r"""#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0; fi
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
echo "$1" >> "$CALLS"
grep -q broken "$1" && { echo "$1(3): error: identifier is undefined" >&2; exit 1; }
for k in $(sed -n 's/^KERNEL(\(.*\))/\1/p' "$1"); do
  echo "ptxas info    : Compiling entry function '$k' for 'sm_90a'
ptxas info    : Function properties for $k
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem" >&2
done
cat "$1" "$INCLUDE/deep.cuh" > "$out"
grep -q 'touched meanwhile' "$1" && echo "// more" >> "$1"
grep -q 'killed here' "$1" && kill -9 $PPID
exit 0
"""
SOURCE = """// op scale, shift: rows times a number.
#include "math.cuh"
// variant scale_f32: dtype=f32
KERNEL(scale_f32)
"""
OTHER = "// op sort: rows by key.\n// variant sort_f32: dtype=f32 most=4096\nKERNEL(sort_f32)\n"

# A build of sm_90a in a process of its own, one unit after the other.
KILLED = """
import sys
from pathlib import Path
from pegainfer.kernels import build
build.ROOT = Path(sys.argv[1])
build.build_kernels(["90a"], ["scale", "sort"], Path(sys.argv[2]), 1)
"""


class Tree:
    """A tree of kernel sources and a compiler that notes what it is asked for."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.out, self.calls = root / "cuda", root / "cubins", root / "calls"
        for folder in ("common/rows", "sm90/rows", "include"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "common/rows/scale.cu").write_text(SOURCE)
        (self.root / "sm90/rows/sort.cu").write_text(OTHER)
        (self.root / "include/math.cuh").write_text('#include "deep.cuh"\n')
        (self.root / "include/deep.cuh").write_text("// nothing\n")
        compiler = root / "bin" / "nvcc"
        compiler.parent.mkdir()
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        monkeypatch.setattr(build, "ROOT", self.root)
        monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("CALLS", str(self.calls))
        monkeypatch.setenv("INCLUDE", str(self.root / "include"))

    def build(self, *archs: str, ops: tuple[str, ...] | None = None) -> list[str]:
        """Builds; returns the names of the sources that were compiled for it."""
        self.calls.write_text("")
        build.build_kernels(archs, ops, self.out, jobs=2)
        return sorted(Path(line).name for line in self.calls.read_text().splitlines())

    def cubin(self, kernel: str) -> Path:
        """The file that the manifest of sm_90a names for <kernel>_f32."""
        manifest = read_manifest(self.out / "90a")
        found = manifest.variant(f"{kernel}_f32") if manifest else None
        assert found is not None
        return self.out / "90a" / found[0].cubin

    def files(self) -> set[str]:
        return {p.name for p in (self.out / "90a").iterdir()}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_every_source_declares_ops_and_kernels() -> None:
    sources = build.find_sources()
    names = [name for s in sources for name in s.variants]
    assert len(sources) > 10 and len(names) == len(set(names))
    assert len({s.cubin("0" * 16) for s in sources}) == len(sources)
    assert all(build.source_hash(s, "90a", "V13.0.88") for s in sources)


def test_manifest_says_what_the_compiler_reports(tree: Tree) -> None:
    assert tree.build("90a") == ["scale.cu", "sort.cu"]
    manifest = read_manifest(tree.out / "90a")
    assert manifest is not None and manifest.compiler == "V13.0.88"
    found = manifest.variant("sort_f32")
    assert found is not None
    unit, variant = found
    assert (unit.ops, unit.cubin) == (("sort",), f"sm90.rows.sort.{unit.hash}.cubin")
    assert variant.features == {"dtype": "f32", "most": "4096"}
    assert (variant.registers, variant.shared, variant.stack, variant.spills) == (40, 128, 0, 12)
    assert set(manifest.ops) == {"scale", "shift", "sort"}


def test_sources_of_one_architecture_are_built_for_it_alone(tree: Tree) -> None:
    assert tree.build("80", "120a") == ["scale.cu", "scale.cu"]


def test_only_what_changed_is_compiled_again(tree: Tree) -> None:
    tree.build("90a")
    assert tree.build("90a") == []
    (tree.root / "include/deep.cuh").write_text("// something\n")
    assert tree.build("90a") == ["scale.cu"]  # through two headers
    tree.cubin("sort").unlink()
    assert tree.build("90a") == ["sort.cu"]
    (tree.out / "90a" / "manifest.json").write_text("{")
    assert tree.build("90a") == ["scale.cu", "sort.cu"]


def test_what_has_changed_since_is_told_without_a_compiler(tree: Tree) -> None:
    tree.build("90a", ops=("scale",))
    manifest = read_manifest(tree.out / "90a")
    assert manifest is not None and build.stale_units(manifest) == []
    (tree.root / "include/deep.cuh").write_text("// something\n")
    assert build.stale_units(manifest) == ["common/rows/scale.cu"]


def test_ops_choose_sources_and_others_stay(tree: Tree) -> None:
    assert tree.build("90a", ops=("sort",)) == ["sort.cu"]
    assert tree.build("90a", ops=("shift",)) == ["scale.cu"]
    manifest = read_manifest(tree.out / "90a")
    assert manifest is not None and len(manifest.units) == 2
    with pytest.raises(KernelsError, match="no CUDA kernels for these ops; got flip"):
        tree.build("90a", ops=("flip",))


def test_kernels_choose_units_by_architecture(tree: Tree) -> None:
    wanted = {"90a": {"sort_f32"}, "80": {"scale_f32"}}
    names = {name for s in build.find_sources() for name in s.variants}
    assert {k for kernels in wanted.values() for k in kernels} <= names
    made = build.build_kernels(["90a", "80"], None, tree.out, 1, None, wanted)
    assert [[u.source for u in m.units] for m in made] == [["sm90/rows/sort.cu"], ["common/rows/scale.cu"]]


def test_progress_counts_units(tree: Tree) -> None:
    seen: list[tuple[int, int, str]] = []
    build.build_kernels(["90a", "80"], None, tree.out, 1, lambda *step: seen.append(step))
    assert [s[:2] for s in seen] == [(1, 3), (2, 3), (3, 3)]
    assert {s[2] for s in seen} == {
        "common/rows/scale.cu sm_90a",
        "sm90/rows/sort.cu sm_90a",
        "common/rows/scale.cu sm_80",
    }


def test_the_compilers_own_words_are_passed_on(tree: Tree) -> None:
    (tree.root / "common/rows/scale.cu").write_text(SOURCE + "broken\n")
    with pytest.raises(
        KernelsError, match=r"scale.cu does not compile for sm_90a:\n.*identifier is undefined"
    ):
        tree.build("90a")
    assert read_manifest(tree.out / "90a") is None  # nothing half-built is announced


def test_a_build_that_fails_leaves_what_was_built_before(tree: Tree) -> None:
    tree.build("90a")
    before, text = tree.cubin("scale"), tree.cubin("scale").read_text()
    scale, sort = tree.root / "common/rows/scale.cu", tree.root / "sm90/rows/sort.cu"
    scale.write_text(SOURCE + "// other\n")
    sort.write_text(OTHER + "broken\n")
    with pytest.raises(KernelsError, match=r"sort.cu does not compile"):
        build.build_kernels(["90a"], None, tree.out, jobs=1)  # scale.cu before it
    assert tree.cubin("scale") == before and before.read_text() == text
    scale.write_text(SOURCE)
    sort.write_text(OTHER)
    assert tree.build("90a") == []
    assert "// other" not in tree.cubin("scale").read_text()


def test_a_build_that_is_killed_leaves_what_was_built_before(tree: Tree) -> None:
    tree.build("90a")
    before, text = tree.cubin("scale"), tree.cubin("scale").read_text()
    sort, deep = tree.root / "sm90/rows/sort.cu", tree.root / "include/deep.cuh"
    deep.write_text("// something\n")
    sort.write_text(OTHER + "// killed here\n")
    child = subprocess.run([sys.executable, "-c", KILLED, str(tree.root), str(tree.out)])
    assert child.returncode == -signal.SIGKILL
    assert tree.cubin("scale") == before and before.read_text() == text
    sort.write_text(OTHER)
    assert tree.build("90a") == ["scale.cu"]  # the lock has gone; what was compiled is not in the manifest
    assert "something" in tree.cubin("scale").read_text()
    assert tree.files() == {"manifest.json", tree.cubin("scale").name, tree.cubin("sort").name}


def test_a_source_that_changes_while_it_is_compiled_is_refused(tree: Tree) -> None:
    scale = tree.root / "common/rows/scale.cu"
    scale.write_text(SOURCE + "// touched meanwhile\n")
    with pytest.raises(KernelsError, match=r"scale.cu or a header of its has changed while it was compiled"):
        tree.build("90a", ops=("scale",))
    assert not [name for name in tree.files() if "scale" in name]


def test_one_build_at_a_time_and_both_are_in_the_manifest(tree: Tree) -> None:
    waits = threading.Event()

    def other() -> None:
        build.build_kernels(["90a"], ["sort"], tree.out, 1, lambda count, units, what: told(what))

    def told(what: str) -> None:
        if what == "waiting for another build":
            waits.set()

    thread = threading.Thread(target=other)
    with sole_build(tree.out, lambda: None):
        thread.start()
        assert waits.wait(60)
        assert not tree.calls.exists()
    thread.join()
    tree.build("90a", ops=("scale",))
    assert tree.cubin("sort").exists() and tree.cubin("scale").exists()


def test_a_kernel_without_declaration_is_refused(tree: Tree) -> None:
    (tree.root / "common/rows/scale.cu").write_text(SOURCE + "KERNEL(scale_f64)\n")
    with pytest.raises(KernelsError, match="lines differ; got scale_f64"):
        tree.build("90a")
    (tree.root / "common/rows/scale.cu").write_text("KERNEL(scale_f64)\n")
    with pytest.raises(KernelsError, match="kernel source without"):
        tree.build("90a")


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(KernelsError, match="unknown architecture; expected 80 86 89 90a 100a 120a; got 75"):
        build.build_kernels(["75"], None, Path("nowhere"))


def test_no_compiler_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build.os, "access", lambda *a: False)
    with pytest.raises(KernelsError, match=r"no CUDA compiler; .*pip install 'pegainfer\[kernels\]'"):
        build.find_compiler()


def test_an_old_compiler_is_refused(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tree.root.parent / "bin" / "nvcc"
    nvcc.write_text(COMPILER.replace("13.0", "12.4"))
    with pytest.raises(
        KernelsError, match=r"the CUDA compiler is too old; expected 13.0 or newer; got .*V12"
    ):
        tree.build("90a")


def test_a_manifest_of_another_version_is_refused(tree: Tree) -> None:
    tree.build("90a")
    path = tree.out / "90a" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(KernelsError, match="built by another version; expected 1; got 0"):
        read_manifest(tree.out / "90a")
