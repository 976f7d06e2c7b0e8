"""What every weights file offers a model line, and the mmap that both readers stand on.

NumPy is imported by `raw` alone: a process that reads only metadata starts without it (0.1 s, 15 MB).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from pegainfer.contract.errors import ModelFileError

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
    """Named tensors in one file or several. A context manager; views stay valid until `close`."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def raw(self, name: str) -> Bytes:
        """A read-only view of the tensor's bytes, [nbytes] uint8, on the mapped file (nothing is copied).

        Raises ModelFileError where there is no such tensor.
        """

    def origin(self, name: str) -> tuple[str, int]:
        """(path, offset) of the tensor's bytes, for those who would rather read than map them.

        Raises ModelFileError where there is no such tensor.
        """

    def release(self, name: str | None = None) -> None:
        """Tells the kernel that the pages (of one tensor or of all) may go; a later read maps them anew."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Closing(ABC):
    """`with` for what has a `close`."""

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

    def raw(self, name: str) -> Bytes:
        """A read-only view of the tensor's bytes, [nbytes] uint8; see TensorFile."""
        info = self._info(name)
        if self._closed:
            raise ModelFileError("weights file was closed", where=self._path)
        import numpy as np

        return np.frombuffer(self._map, np.uint8, count=info.nbytes, offset=info.offset)

    def origin(self, name: str) -> tuple[str, int]:
        """See TensorFile."""
        return str(self._path), self._info(name).offset

    def release(self, name: str | None = None) -> None:
        if self._closed:
            return
        start, stop = 0, self.size
        if name is not None:
            info = self._info(name)
            start, stop = info.offset, info.offset + info.nbytes
        # madvise wants a page's start; a shared page is read again when needed.
        start -= start % mmap.PAGESIZE
        if stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Idempotent. Views that are still held keep the mapping alive until they are dropped."""
        self._closed = True
        with contextlib.suppress(BufferError):
            self._map.close()

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise missing_tensor(name, len(self._tensors), self._path)
        return info


def missing_tensor(name: str, others: int, where: Path) -> ModelFileError:
    """What who asks for a tensor that is not among the `others` is told."""
    return ModelFileError(
        "tensor is missing",
        expected=repr(name),
        got=f"{others} other tensors",
        where=where,
        remedy="use a complete model of a line that this build knows",
    )
