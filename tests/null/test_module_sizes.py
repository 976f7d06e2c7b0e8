"""Files and functions one can read in one sitting; one that must be longer says why at its head."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "pegainfer"

# Suffix -> most lines.
LIMITS = {".py": 300, ".js": 300, ".css": 300, ".html": 300, ".cpp": 800, ".h": 800, ".cu": 800, ".cuh": 800}
MAX_FUNCTION_LINES = 60  # a Triton kernel is a kernel: its file is what is bounded
HEAD = 15  # lines within which the reason must stand
REASON = re.compile(r"\blong(er than \d+ lines)? because\b", re.IGNORECASE)


def test_long_files_say_why() -> None:
    silent = []
    for path in sorted(PACKAGE.rglob("*")):
        limit = LIMITS.get(path.suffix)
        if limit is None or "vendor" in path.parts:
            continue
        lines = path.read_text().splitlines()
        if len(lines) > limit and not REASON.search("\n".join(lines[:HEAD])):
            silent.append(f"{path.relative_to(PACKAGE)}: {len(lines)} lines, over {limit}")
    assert not silent, "split these, or say 'Long because …' at their head:\n" + "\n".join(silent)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_long_functions_say_why() -> None:
    """Nested ones count as a part of the function around them."""
    silent = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if "triton" in path.relative_to(PACKAGE).parts:
            continue
        for function in functions(path):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES and not REASON.search(ast.get_docstring(function) or ""):
                where = f"{path.relative_to(PACKAGE)}:{function.lineno}"
                silent.append(f"{where} {function.name}: {lines} lines, over {MAX_FUNCTION_LINES}")
    assert not silent, "split these, or say 'Long because …' in their docstrings:\n" + "\n".join(silent)
