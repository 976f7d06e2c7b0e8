"""What `make golden` calls equal, and what it does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SPEC = importlib.util.spec_from_file_location("golden", Path(__file__).parents[3] / "tools" / "golden.py")
assert SPEC is not None
assert SPEC.loader is not None
golden: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(golden)


def hexed(*values: float) -> str:
    return np.array(values, "<f4").tobytes().hex()


def test_noise_is_equal_and_names_do_not_count() -> None:
    old = {"made_by": "a 1", "ids": [1, 2], "text": "x", "p": 0.5, "raw": hexed(1.0, 2.0)}
    new = {"made_by": "a 2", "ids": [1, 2], "text": "x", "p": 0.50001, "raw": hexed(1.00001, 2.0)}
    assert golden.compare(old, new, "f") == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1]),
        ("same", "else"),
        (0.5, 0.51),
        (hexed(1.0), hexed(1.1)),
        (hexed(1.0), hexed(1.0, 2.0)),
        (1, 1.0001),
    ],
)
def test_differences_are_found(old: Any, new: Any) -> None:
    with pytest.raises(golden.Difference):
        golden.compare(old, new, "f")


def test_arrays(tmp_path: Path) -> None:
    old = {
        "0.ids": np.arange(300),
        "0.top_ids": np.arange(300),
        "0.p": np.ones(3),
        "provenance": np.array("x"),
    }
    np.savez(tmp_path / "old.npz", **old)
    swapped = old["0.top_ids"].copy()
    swapped[:2] = swapped[1::-1]  # a tie in noise
    np.savez(tmp_path / "new.npz", **old | {"0.top_ids": swapped, "provenance": np.array("y")})
    assert golden.compare_files(tmp_path / "old.npz", tmp_path / "new.npz") == 0.0
    for change in ({"0.ids": swapped}, {"0.p": np.ones(3) * 1.1}, {"0.p": np.ones(4)}, {"1.p": np.ones(3)}):
        np.savez(tmp_path / "new.npz", **old | change)
        with pytest.raises(golden.Difference):
            golden.compare_files(tmp_path / "old.npz", tmp_path / "new.npz")
