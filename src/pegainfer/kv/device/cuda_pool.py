"""Memory on a GPU for the blocks and states of all KV groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pegainfer.contract.step import BlockCopy
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor


class CudaPools:
    """The pools of all groups on a GPU; contents are undefined until a block is first written.

    Args:
        states: by part name: [num_blocks, *shape].
    """

    def __init__(self, layouts: Sequence[GroupLayout], num_blocks: Sequence[int]) -> None:
        """Raises CudaError where memory is short."""
        self.states: dict[str, DeviceTensor] = {}
        self._groups: list[list[tuple[int, int]]] = []  # address and bytes a block of each part
        for layout, count in zip(layouts, num_blocks, strict=True):
            places = []
            for part in layout.parts:
                tensor = DeviceTensor.empty((count, *part.shape), part.dtype, f"KV group {layout.name}")
                self.states[part.name] = tensor
                places.append((tensor.address, part.nbytes))
            self._groups.append(places)

    @property
    def places(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each group, address and bytes a block of each part."""
        return self._groups

    def copy(self, copies: Iterable[BlockCopy], stream: Stream) -> None:
        """Puts copies of whole blocks on the stream, in order."""
        for c in copies:
            for address, nbytes in self._groups[c.group]:
                stream.copy(address + c.dst * nbytes, address + c.src * nbytes, nbytes, c)
