"""The interface of weights files, and the memory mapping that the readers of both kinds share.

NumPy is imported where arrays are made: a process that reads only metadata starts without it (0.1 s, 15 MB).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, Self, TypeVar

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.part import Extent, Part

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]


class TensorInfo(NamedTuple):
    """Where a tensor lies. The span was checked against the file when it was opened."""

    name: str
    format: str  # a key of FORMATS
    shape: tuple[int, ...]  # NumPy order: the contiguous axis comes last
    offset: int  # bytes from the file's start
    nbytes: int


class TensorFile(Protocol):
    """Named tensors in one file or several. A context manager; parts can be read until `close`."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def part(self, name: str) -> Part:
        """Where the tensor lies; nothing is read.

        Raises ModelFileError where there is no such tensor, or its rows are not whole blocks.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Closing(ABC):
    """Makes a class that has `close` a context manager."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MappedFile(Closing):
    """A read-only mapping of one file and the table of its tensors; a reader fills the table."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ModelFileError where the file is missing, unreadable, empty or not a file."""
        self._path = Path(path)
        self._tensors: dict[str, TensorInfo] = {}
        try:
            with open(self._path, "rb") as f:
                self.size = os.fstat(f.fileno()).st_size
                if self.size == 0:
                    raise ModelFileError("weights file is empty", where=self._path)
                self._map = mmap.mmap(f.fileno(), self.size, access=mmap.ACCESS_READ)
                self._file = os.dup(f.fileno())
                self._close_file = weakref.finalize(self, os.close, self._file)
        except (OSError, ValueError) as e:
            reason = (e.strerror if isinstance(e, OSError) else None) or str(e)
            raise ModelFileError(f"cannot read weights file: {reason}", where=self._path) from None
        self._closed = False

    @property
    def path(self) -> Path:
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def part(self, name: str) -> Part:
        """See TensorFile."""
        info = self._info(name)
        return Part.at(info.format, info.shape, self, info.offset)

    def view(self) -> Bytes:
        """The whole file, [size] uint8, read-only. Raises ModelFileError once it is closed."""
        self._refuse_closed()
        import numpy as np

        return np.frombuffer(self._map, np.uint8)

    def read(self, extent: Extent, into: Bytes) -> None:
        """See Source. Rows without gaps are read, since mapped pages count as memory of the process.

        Rows with gaps are copied out of the mapping: a system call for each would take longer.
        """
        self._refuse_closed()
        if not extent.is_contiguous:
            into.reshape(extent.rows, extent.width)[...] = extent.mapped()
            return
        rest, at = memoryview(into.data), extent.offset
        while rest:
            count = os.preadv(self._file, [rest], at)
            if count == 0:
                raise ModelFileError(
                    "weights file became shorter after it was opened",
                    expected=f"{self.size} bytes",
                    got=at,
                    where=self._path,
                    remedy="start again once the file is complete",
                )
            rest, at = rest[count:], at + count

    def forget(self, extent: Extent) -> None:
        """Unmaps the pages: the system's file cache keeps them, but they no longer count as the process's."""
        self._refuse_closed()
        if hasattr(mmap, "MADV_DONTNEED"):
            start = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, extent.end - start)

    def close(self) -> None:
        """Idempotent. Views that are still held keep the mapping alive until they are dropped."""
        self._closed = True
        self._close_file()
        with contextlib.suppress(BufferError):
            self._map.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ModelFileError("weights file was closed", where=self._path)

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise missing_tensor(name, len(self._tensors), self._path)
        return info


File = TypeVar("File", bound=MappedFile)


class FileSet(Closing, Generic[File]):
    """Several open files as one TensorFile. A subclass fills `_files` and where each tensor is."""

    def __init__(self, path: Path) -> None:
        """`path`: what errors name."""
        self._path = path
        self._files: list[File] = []
        self._home: dict[str, File] = {}
        self._tensors: dict[str, TensorInfo] = {}

    @property
    def path(self) -> Path:
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Offsets count within each tensor's own file."""
        return self._tensors

    def part(self, name: str) -> Part:
        """See TensorFile."""
        file = self._home.get(name)
        if file is None:
            raise missing_tensor(name, len(self._tensors), self._path)
        return file.part(name)

    def close(self) -> None:
        for file in self._files:
            file.close()


def missing_tensor(name: str, others: int, where: Path) -> ModelFileError:
    """The error for a tensor that a file with `others` tensors lacks."""
    return ModelFileError(
        "tensor is missing",
        expected=repr(name),
        got=f"{others} other tensors",
        where=where,
        remedy="use a complete model of a line that this build knows",
    )
