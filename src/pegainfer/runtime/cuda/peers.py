"""What a GPU has of the other ranks of its group: their exchange memory, and how they wait for each other.

kernels/cuda/include/ranks.cuh reads and writes it. Ranks are processes, of one machine, with a GPU each; on
one GPU together they are right as well, and slow.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct as c_struct
from collections.abc import Iterator

from pegainfer.contract.errors import ConfigError
from pegainfer.runtime.cuda.arguments import CONTROL, MAX_RANKS
from pegainfer.runtime.cuda.driver import bindings, call
from pegainfer.runtime.cuda.layout import packing
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.rank_memory import PAGE, RankMemory

HEAD_BYTES = 1 << 16  # of flags, before the slots
TAGGED_BYTES = 1 << 21  # of a slot for values with a tag beside each
SAMPLED_BYTES = 1 << 20  # of a slot for what the ranks exchange when they sample
PART_VALUES = 1 << 20  # float32 that a rank sends to each other one in a sum at most
PART_BYTES = 4 * PART_VALUES
SETS = 4  # of slots, one a rank in each: two phases of a sum, and of the one before
DEVICE_MAP = 2  # CU_MEMHOSTREGISTER_DEVICEMAP of cuda.h
# The driver exports whole allocations, which it makes in multiples of this.
EXPORTED = 2 << 20
_ALONE = CONTROL.offset("alone")


class Peers:
    """One rank's side of a group. Call `connect` once its GPU is ready; until then steps run `alone`.

    Args:
        memory: of the group; not owned.
    """

    def __init__(self, memory: RankMemory) -> None:
        """Raises ConfigError for more ranks than the kernels take, CudaError where memory is short."""
        if memory.ranks > MAX_RANKS:
            raise ConfigError("ranks on GPUs", expected=f"at most {MAX_RANKS}", got=memory.ranks)
        self._group = memory
        head = HEAD_BYTES + 2 * memory.ranks * (TAGGED_BYTES + SAMPLED_BYTES)
        nbytes = head + SETS * memory.ranks * PART_BYTES
        self._memory = DeviceBuffer(-(-nbytes // EXPORTED) * EXPORTED, "exchange with other ranks")
        self._control = DeviceBuffer(CONTROL.size, "control of the ranks")
        self._opened: list[int] = []
        self._host = memory.address  # its first page holds the word that says who failed
        call("cuMemHostRegister", self._host, PAGE, DEVICE_MAP, where="the group's memory")
        stream = Stream()
        stream.fill(self._memory.address, 0, head)  # neither flags nor tags of sums to come
        self._write([0] * memory.ranks, stream, alone=True)

    @property
    def control(self) -> int:
        """Address of the Control of ranks.cuh."""
        return self._control.address

    @property
    def ranks(self) -> int:
        return self._group.ranks

    def connect(self, stream: Stream) -> None:
        """Maps the others' memory; from here on sums are those of all ranks. Returns when all ranks call it.

        Raises PeerFailedError where one fails, CudaError where its memory cannot be mapped.
        """
        d, group = bindings(), self._group
        handle = call("cuIpcGetMemHandle", self._memory.address, where="exchange with other ranks")
        bases = []
        for rank, said in enumerate(group.exchange(bytes(handle.reserved))):
            if rank == group.rank:
                bases.append(self._memory.address)
                continue
            theirs = d.CUipcMemHandle()
            theirs.reserved = said
            peer_access = int(d.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
            base = int(call("cuIpcOpenMemHandle", theirs, peer_access, where=f"memory of rank {rank}"))
            self._opened.append(base)
            bases.append(base)
        self._write(bases, stream, alone=False)

    def _write(self, bases: list[int], stream: Stream, *, alone: bool) -> None:
        """The control anew; `bases`: of the ranks' exchange memory."""
        group = self._group
        values = CONTROL.values(
            {
                "joined": 0, "limit": int(group.seconds * 1e9), "part_bytes": PART_BYTES, "arrived": 0,
                "failed": int(call("cuMemHostGetDevicePointer", self._host, 0)), "alone": int(alone),
                "rank": group.rank, "count": group.ranks, "peers": [{"base": base} for base in bases],
            }
        )  # fmt: skip
        data = ctypes.create_string_buffer(c_struct.pack(packing(CONTROL.kinds), *values))
        stream.upload(self._control.address, ctypes.addressof(data), CONTROL.size)
        stream.synchronize("exchange with other ranks")

    @contextlib.contextmanager
    def alone(self, stream: Stream) -> Iterator[None]:
        """What is put on the stream here runs without the other ranks, whose steps are not counted."""
        stream.fill(self._control.address + _ALONE, 1, 4)
        yield
        if self._opened:
            stream.fill(self._control.address + _ALONE, 0, 4)

    def check(self) -> None:
        """Raises PeerFailedError where the group has failed: steps on the stream are not to be used."""
        self._group.check()

    def close(self) -> None:
        """When the stream has ended its work and the other ranks have ended, or send nothing more."""
        for base in self._opened:
            call("cuIpcCloseMemHandle", base)
        self._opened.clear()
        if self._host:
            call("cuMemHostUnregister", self._host)
            self._host = 0
        self._memory.free()
