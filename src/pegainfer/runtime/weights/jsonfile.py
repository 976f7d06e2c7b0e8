"""JSON that a model's files hold, read as something from outside: bounded, plain, no key given twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from pegainfer.contract.errors import ModelFileError


def read_small_file(path: Path, most: int) -> bytes:
    """A whole file of at most `most` bytes. Raises ModelFileError."""
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size > most:
                raise ModelFileError("file is too large", expected=f"≤ {most} bytes", got=size, where=path)
            return f.read(size)
    except OSError as e:
        raise ModelFileError(f"cannot read file: {e.strerror}", where=path) from None


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which no key is given twice at any depth. Raises ModelFileError."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_pairs, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:  # JSON and Unicode errors are ValueErrors
        raise ModelFileError("not a valid JSON object", got=f"{e!s:.200}", where=where) from None
    if type(value) is not dict:
        raise ModelFileError("not a valid JSON object", got=type(value).__name__, where=where)
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r:.200} is given twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
