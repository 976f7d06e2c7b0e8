"""Makes the golden values anew with the reference libraries and compares them with the files in tests/data.

Run by `make golden` in the golden environment. Exits with 1 where a value differs beyond its bound; `--write`
keeps what was made. tests/golden/make_smollm2_tokens.py is left out: it needs a file that is not here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "golden"
LEFT_OUT = {"make_smollm2_tokens.py"}
PROVENANCE = {"made_by", "provenance"}  # versions may differ, values may not
# Float32 of another CPU: sums in another order.
RTOL, ATOL = 1e-4, 1e-3
# Of the k best tokens, those nearly equal may change places; counted over an array.
MAX_SWAPPED = 2e-3


def main() -> int:
    write = "--write" in sys.argv[1:]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for script in sorted(SCRIPTS.glob("make_*.py")):
            if script.name in LEFT_OUT:
                continue
            started = time.perf_counter()
            kept, made = remake(script, Path(folder))
            found = list(differences(load(kept), load(made)))
            seconds = time.perf_counter() - started
            print(f"{script.name:24} {kept.relative_to(ROOT)!s:40} {seconds:5.1f} s  ", end="")
            print("equal" if not found else "DIFFERS: " + "; ".join(found[:5]), flush=True)
            failed |= bool(found)
            if write:
                kept.write_bytes(made.read_bytes())
    return int(failed and not write)


def remake(script: Path, folder: Path) -> tuple[Path, Path]:
    """Runs a script with its output redirected; the file in the tree, and the one that was made."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kept: Path = module.OUT
    module.OUT = folder / kept.name  # type: ignore[attr-defined]
    module.main()
    return kept, module.OUT


def load(path: Path) -> dict[str, Any]:
    """Flat: a path of keys → a number, string or array."""
    if path.suffix == ".npz":
        with np.load(path) as data:
            return {name: data[name] for name in data.files}
    return dict(flatten(json.loads(path.read_text()), ""))


def flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from flatten(item, f"{path}[{i}]")
    else:
        yield path, value


def differences(kept: dict[str, Any], made: dict[str, Any]) -> Iterator[str]:
    if kept.keys() != made.keys():
        yield f"names {sorted(kept.keys() ^ made.keys())[:5]}"
    for name in kept.keys() & made.keys():
        if name.split(".")[-1] not in PROVENANCE and not same(name, kept[name], made[name]):
            yield name


def same(name: str, kept: Any, made: Any) -> bool:
    if isinstance(kept, str) and isinstance(made, str):
        return kept == made or same_hex(kept, made)
    a, b = np.asarray(kept), np.asarray(made)
    if a.shape != b.shape:
        return False
    if a.dtype.kind == "f" or b.dtype.kind == "f":
        return np.allclose(a.astype(np.float64), b.astype(np.float64), RTOL, ATOL, equal_nan=True)
    if name.endswith("top_ids"):
        return float(np.mean(a != b)) <= MAX_SWAPPED
    return np.array_equal(a, b)


def same_hex(kept: str, made: str) -> bool:
    """Whether both are float32 arrays in hexadecimal, and close."""
    try:
        a, b = (np.frombuffer(bytes.fromhex(text), np.float32) for text in (kept, made))
    except ValueError:
        return False
    return a.shape == b.shape and np.allclose(a, b, RTOL, 1e-6, equal_nan=True)


if __name__ == "__main__":
    sys.exit(main())
