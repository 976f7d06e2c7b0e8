"""Which kernels run, and refusals where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.kernels.cpu import library
from tests.cpu.kernels.harness import ISAS


def test_the_best_is_chosen_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEGAINFER_ISA", raising=False)
    assert library.isa_name() == ISAS[0]
    for name in ISAS:
        assert library.isa_name(name) == name
        monkeypatch.setenv("PEGAINFER_ISA", name)
        assert library.isa_name() == name
        assert library.isa_name("portable") == "portable"


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected .*portable; got sse9"):
        library.kernels("sse9")


def test_a_library_that_is_missing_or_strange_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = library.library.__wrapped__
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libpega_cpu.so")
    with pytest.raises(
        UnsupportedError, match=r"not built.*remedy: python -m pegainfer\.kernels\.cpu\.build"
    ):
        load()
    (tmp_path / "libpega_cpu.so").write_bytes(b"no library")
    with pytest.raises(UnsupportedError, match="does not load"):
        load()


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "source_hash", lambda: "0" * 64)
    with pytest.raises(UnsupportedError, match="built from other sources; expected 000000000000"):
        library.library.__wrapped__()
