"""A file one can read in one sitting; one that must be longer says why at its head."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "pegainfer"

# Suffix -> most lines.
LIMITS = {".py": 300, ".js": 300, ".css": 300, ".html": 300, ".cpp": 800, ".h": 800, ".cu": 800, ".cuh": 800}
HEAD = 15  # lines within which the reason must stand
REASON = re.compile(r"\blong(er than \d+ lines)? because\b", re.IGNORECASE)


def test_long_files_say_why() -> None:
    silent = []
    for path in sorted(PACKAGE.rglob("*")):
        limit = LIMITS.get(path.suffix)
        if limit is None:
            continue
        lines = path.read_text().splitlines()
        if len(lines) > limit and not REASON.search("\n".join(lines[:HEAD])):
            silent.append(f"{path.relative_to(PACKAGE)}: {len(lines)} lines, over {limit}")
    assert not silent, "split these, or say 'Long because …' at their head:\n" + "\n".join(silent)
