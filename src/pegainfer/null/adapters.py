"""Adapters of the null device: files of any content, of which only the digest changes what is computed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pegainfer.contract.adapter import NO_ADAPTER, AdapterInfo
from pegainfer.contract.errors import InvariantError, ModelFileError


class NullAdapters:
    """Digests by index. Raises InvariantError where an index is used wrongly."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._digests: dict[int, bytes] = {}

    def read(self, name: str, path: str) -> tuple[AdapterInfo, bytes]:
        """Reads a file, or all files of a directory. Raises ModelFileError."""
        root = Path(path)
        digest = hashlib.sha256()
        try:
            for file in [root] if root.is_file() else sorted(root.iterdir()):
                digest.update(file.read_bytes())
        except OSError as error:
            raise ModelFileError("cannot read the adapter", got=error.strerror, where=path) from error
        return AdapterInfo(name=name, path=path, digest=digest.digest()), digest.digest()

    def install(self, index: int, digest: bytes) -> None:
        if not 0 <= index < self._size or index in self._digests:
            raise InvariantError(f"adapter index {index} is taken or does not exist")
        self._digests[index] = digest

    def remove(self, index: int) -> None:
        if self._digests.pop(index, None) is None:
            raise InvariantError(f"adapter {index} is removed but not installed")

    @property
    def indices(self) -> list[int]:
        """Of what is installed."""
        return sorted(self._digests)

    def digest(self, index: int) -> bytes:
        """Of the adapter of a slot; empty for the base model."""
        if index == NO_ADAPTER:
            return b""
        if index not in self._digests:
            raise InvariantError(f"a slot uses adapter {index}, which is not installed")
        return self._digests[index]
