"""Makes every golden file anew and compares it with the committed one.

Runs each tests/golden/make_*.py in the golden environment (`make golden`). Whole numbers and texts must be
equal; floats may differ by the noise of another processor or library build. `--write` replaces the files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
MAKERS = sorted((ROOT / "tests" / "golden").glob("make_*.py"))
RTOL, ATOL = 1e-5, 2e-4  # atol: nat, twenty times what two kernels of one library were seen to differ by
TOP_IDS = (
    0.01  # share of best-token ids that may differ: neighbours whose log-probabilities are equal in noise
)
NOTES = ("made_by", "provenance")  # names and versions, not values
HEX = re.compile(r"([0-9a-f]{8})+")


class Difference(Exception):
    """Where two golden files part, and how far."""


def compare(old: Any, new: Any, where: str) -> float:
    """The greatest difference between floats. Raises Difference where it is no noise."""
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            raise Difference(f"{where}: keys {sorted(old.keys() ^ new.keys())}")
        return max((compare(old[k], new[k], f"{where}.{k}") for k in old if k not in NOTES), default=0.0)
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            raise Difference(f"{where}: {len(old)} and {len(new)} items")
        pairs = enumerate(zip(old, new, strict=True))
        return max((compare(a, b, f"{where}[{i}]") for i, (a, b) in pairs), default=0.0)
    if old != new and all(isinstance(s, str) and HEX.fullmatch(s) for s in (old, new)):
        # float32 values as bytes
        return compare_arrays(*(np.frombuffer(bytes.fromhex(s), "<f4") for s in (old, new)), where)
    if isinstance(old, float) and isinstance(new, float):
        return compare_arrays(np.array(old), np.array(new), where)
    if old != new:
        raise Difference(f"{where}: {old!r:.60} and {new!r:.60}")
    return 0.0


def compare_arrays(old: np.ndarray, new: np.ndarray, where: str) -> float:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise Difference(f"{where}: {old.dtype} {old.shape} and {new.dtype} {new.shape}")
    if old.dtype.kind != "f":
        wrong = float(np.mean(old != new))
        if wrong > (TOP_IDS if where.endswith("top_ids") else 0.0):
            raise Difference(f"{where}: {wrong:.2%} of the numbers differ")
        return 0.0
    error = np.abs(old - new)
    if not np.allclose(old, new, RTOL, ATOL, equal_nan=True):
        raise Difference(f"{where}: floats differ by up to {np.nanmax(error):.2e}")
    return float(np.nanmax(error, initial=0.0))


def read(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def compare_files(old: Path, new: Path) -> float:
    a, b = read(old), read(new)
    if old.suffix == ".json":
        return compare(a, b, old.name)
    if a.keys() != b.keys():
        raise Difference(f"{old.name}: arrays {sorted(a.keys() ^ b.keys())}")
    return max(compare_arrays(a[n], b[n], f"{old.name}.{n}") for n in a if n not in NOTES)


def load(maker: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(maker.stem, maker)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(maker: Path, write: bool) -> str:
    """Makes one file; what came of it in words. Raises Difference."""
    module = load(maker)
    committed: Path = module.OUT
    if write:
        module.main()
        return "written"
    with tempfile.TemporaryDirectory() as folder:
        module.OUT = Path(folder) / committed.name
        module.main()
        return f"floats within {compare_files(committed, module.OUT):.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the committed files")
    parser.add_argument("makers", nargs="*", help="parts of makers' names; default: all")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # a maker run here takes no arguments
    failed = 0
    for maker in MAKERS:
        if options.makers and not any(part in maker.stem for part in options.makers):
            continue
        print(f"{maker.stem:<24} ", end="", flush=True)
        start = time.perf_counter()
        try:
            words = run(maker, options.write)
        except Difference as e:
            words, failed = f"DIFFERS: {e}", failed + 1
        print(f"{time.perf_counter() - start:6.1f} s  {words}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
