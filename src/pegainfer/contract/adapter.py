"""LoRA adapters: what is known of a loaded one, and how a runner takes them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import msgspec

NO_ADAPTER = -1  # adapter index of rows that run the base model


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter."""

    name: str  # as GenerateRequest.adapter names it
    path: str  # of the directory that it was read from
    digest: bytes  # SHA-256 of its content; the root of prefix hashes, so that equal names never mix
    rank: int = 0  # of its matrices, the largest over all modules; 0 where the runner has none


class AdapterLoad(msgspec.Struct, frozen=True):
    """An adapter is to be installed under an index, where another one may be installed."""

    index: int
    info: AdapterInfo


@runtime_checkable
class AdapterRunner(Protocol):
    """A runner that serves adapters: `RunnerInfo.max_adapters` > 0.

    All methods may be called on any thread while steps run, several at once for different indices.
    """

    def read_adapter(self, name: str, path: str) -> tuple[AdapterInfo, Any]:
        """Reads and checks an adapter's files; the second part is handed to `install_adapter`.

        Raises PegaError (ModelFileError, UnsupportedError) where it cannot be served.
        """

    def install_adapter(self, index: int, adapter: Any) -> None:
        """Makes an adapter available under an index in [0, max_adapters) that no plan in flight uses.

        When it returns, plans may use it. It takes as long as its copies take.

        Raises PegaError where it cannot; the index is then free.
        """

    def remove_adapter(self, index: int) -> None:
        """Frees an index. No plan in flight has a row that uses it, and none to come will have one."""
