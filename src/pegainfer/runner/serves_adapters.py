"""The adapter calls of a runner. Imports nothing that a runner without adapters does not need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import InvariantError

if TYPE_CHECKING:
    from pegainfer.runner.adapters import Laid


class Slots(Protocol):
    """Adapters of a device by index; see AdapterRunner."""

    def read(self, name: str, path: str) -> tuple[AdapterInfo, dict[str, Laid]]: ...

    def install(self, index: int, laid: Mapping[str, Laid]) -> None: ...

    def remove(self, index: int) -> None: ...


class ServesAdapters:
    """Implements contract.adapter.AdapterRunner for runners with `_adapters`; None: built without."""

    _adapters: Slots | None

    def read_adapter(self, name: str, path: str) -> tuple[AdapterInfo, Mapping[str, Laid]]:
        return self._slots_of_adapters().read(name, path)

    def install_adapter(self, index: int, adapter: Mapping[str, Laid]) -> None:
        self._slots_of_adapters().install(index, adapter)

    def remove_adapter(self, index: int) -> None:
        self._slots_of_adapters().remove(index)

    def _slots_of_adapters(self) -> Slots:
        if self._adapters is None:
            raise InvariantError("adapters are used in a runner that was built without")
        return self._adapters
