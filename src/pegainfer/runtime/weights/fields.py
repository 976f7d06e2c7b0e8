"""Typed access to a model's config or metadata, which came from outside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pegainfer.contract.errors import ConfigError, UnsupportedError

MAX_DIM = 1 << 20  # of any width; far above real models, and keeps products of sizes within 63 bits


class Fields:
    """A mapping whose values are checked as they are read. A key that is null counts as absent.

    Args:
        where: names the file in errors.
        line: the model line on whose behalf a feature is refused.
        prefix: stands before each key in errors.
    """

    def __init__(self, source: Mapping[str, Any], where: str, *, line: str, prefix: str = "") -> None:
        self._source = source
        self._where = where
        self._line = line
        self._prefix = prefix

    def inner(self, source: Mapping[str, Any], prefix: str) -> Fields:
        """The same file's fields under another key."""
        return Fields(source, self._where, line=self._line, prefix=prefix)

    def has(self, key: str) -> bool:
        return self._source.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_DIM) -> int:
        value = self._get(key, default)
        self.require(key, type(value) is int and least <= value <= most, f"an integer from {least} to {most}")
        return int(value)

    def number(
        self, key: str, default: float | None = None, *, least: float = 0.0, most: float = math.inf
    ) -> float:
        """A finite number above zero within [least, most]."""
        value = self._get(key, default)
        fits = type(value) in (int, float) and math.isfinite(value) and value > 0 and least <= value <= most
        self.require(key, fits, f"a number above 0, from {least:g} to {most:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        self.require(key, type(value) is bool, "true or false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        self.require(key, type(value) is str, "a string")
        return str(value)

    def texts(self, key: str) -> list[str]:
        """A list of strings, empty where there is none."""
        value = self._get(key, [])
        fits = isinstance(value, list) and all(type(v) is str for v in value)
        self.require(key, fits, "a list of strings")
        return list(value)

    def integers(self, key: str, *, most: int = MAX_DIM) -> list[int]:
        """A list of integers from 0 to `most`, empty where there is none."""
        value = self._get(key, [])
        fits = isinstance(value, list) and all(type(v) is int and 0 <= v <= most for v in value)
        self.require(key, fits, f"a list of integers from 0 to {most}")
        return list(value)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, None where it is absent or empty."""
        value = self._get(key, {})
        self.require(key, isinstance(value, Mapping), "an object")
        return value or None

    def require(self, key: str, holds: bool, expected: str) -> None:
        """Raises ConfigError for a value that cannot be right."""
        if not holds:
            raise ConfigError(
                f"model config: {self._prefix}{key} is wrong",
                expected=expected,
                got=f"{self._source.get(key)!r:.80}",
                where=self._where,
            )

    def refuse(self, key: str, wrong: bool, *, expected: object, got: object = None) -> None:
        """Raises UnsupportedError for a feature that exists in the field but not in this model line."""
        if wrong:
            raise UnsupportedError(
                f"{self._line}: {self._prefix}{key} is not supported",
                expected=expected,
                got=f"{self._source.get(key) if got is None else got!r:.80}",
                where=self._where,
            )

    def _get(self, key: str, default: Any) -> Any:
        value = self._source.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"model config: {self._prefix}{key} is missing", where=self._where)
        return value
