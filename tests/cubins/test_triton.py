"""The build of Triton sources, on a kernel made for these tests. Needs Triton and nvcc, no GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pegainfer.kernels import build
from pegainfer.kernels.manifest import KernelsError, Manifest
from tests.support.cubin_files import architecture
from tests.support.triton import SOURCE

pytest.importorskip("triton", reason="Triton is not installed: make kernels")
ARCHS = ("80", "90a", "120a")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of kernel sources that has only the Triton source, which a test may change."""
    (tmp_path / "cuda").mkdir()
    path = tmp_path / "triton" / "rows" / SOURCE.name
    path.parent.mkdir(parents=True)
    shutil.copy(SOURCE, path)
    monkeypatch.setattr(build, "ROOT", tmp_path / "cuda")
    return path


def compiled(arch: str, folder: Path) -> Manifest:
    (manifest,) = build.build_kernels([arch], ["row_sums"], folder)
    return manifest


@pytest.mark.parametrize("arch", ARCHS)
def test_each_variant_becomes_a_cubin_of_its_architecture(arch: str, source: Path, tmp_path: Path) -> None:
    manifest = compiled(arch, tmp_path)
    assert [u.source for u in manifest.units] == [
        "triton/rows/row_sums.py:row_sums_bf16_64", "triton/rows/row_sums.py:row_sums_f32_128",
    ]  # fmt: skip
    for unit in manifest.units:
        (variant,) = unit.variants
        data = (tmp_path / arch / unit.cubin).read_bytes()
        assert architecture(data) == int(arch.rstrip("a"))
        assert variant.name.encode() + b"\0" in data
        assert unit.ops == ("row_sums",) and variant.spills == 0 and variant.registers > 0
    found = manifest.variant("row_sums_f32_128")
    assert found is not None
    # Sums of four warps meet in shared memory; a launch must ask for these bytes.
    features = dict(found[1].features)
    assert int(features.pop("shared")) >= 4 * 4
    assert features == {"dtype": "f32", "block": "128", "warps": "4", "stages": "3"}


def test_only_variants_that_changed_are_compiled_again(source: Path, tmp_path: Path) -> None:
    before = compiled("90a", tmp_path)
    assert build.stale_units(before) == []
    source.write_text(source.read_text().replace("block=64", "block=32"))
    assert build.stale_units(before) == ["triton/rows/row_sums.py:row_sums_bf16_64"]
    written = {u.source: (tmp_path / "90a" / u.cubin).stat().st_mtime_ns for u in before.units}
    after = compiled("90a", tmp_path)
    changed = {
        u.source for u in after.units if (tmp_path / "90a" / u.cubin).stat().st_mtime_ns != written[u.source]
    }
    assert changed == {"triton/rows/row_sums.py:row_sums_bf16_64"}
    source.write_text(source.read_text().replace("tl.sum(sums", "tl.max(sums"))
    assert build.stale_units(after) == [u.source for u in after.units]


def test_the_compilers_own_words_are_passed_on(source: Path, tmp_path: Path) -> None:
    source.write_text(source.read_text().replace("tl.sum(sums, axis=0)", "no_such_function(sums)"))
    with pytest.raises(KernelsError, match=r"does not compile for sm_90a:(.|\n)*no_such_function"):
        compiled("90a", tmp_path)
    assert not list((tmp_path / "90a").glob("*.cubin"))
