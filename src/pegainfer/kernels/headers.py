"""Writes the headers that are generated from Python declarations: `python -m pegainfer.kernels.headers`.
With `--check` it writes nothing and fails where one of them differs from its declaration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pegainfer.kernels.cpu import instructions

ROOT = Path(__file__).parent
HEADERS: dict[Path, Callable[[], str]] = {
    ROOT / "cpu" / "csrc" / "instructions.h": instructions.header,
}


def stale() -> list[Path]:
    """Headers whose text is not what their declaration gives."""
    return [p for p, text in HEADERS.items() if not p.is_file() or p.read_text() != text()]


def main() -> int:
    """Writes stale headers and prints their paths; returns 1 where it only checks and finds one."""
    checks = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not checks:
        print("usage: python -m pegainfer.kernels.headers [--check]", file=sys.stderr)
        return 2
    found = stale()
    for path in found:
        if checks:
            remedy = "remedy: python -m pegainfer.kernels.headers"
            print(f"{path.relative_to(ROOT)} differs from its declaration; {remedy}", file=sys.stderr)
        else:
            path.write_text(HEADERS[path]())
            print(path)
    return int(checks and bool(found))


if __name__ == "__main__":
    sys.exit(main())
