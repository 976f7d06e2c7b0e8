"""safetensors: one file, or shards named by `model.safetensors.index.json`. Headers validated before use.

Layout: header length u64 little-endian, the header as JSON (name -> dtype, shape, data_offsets relative to
the data), data. The data must be covered by the tensors without overlap and without holes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.formats import FORMATS, SAFETENSORS_DTYPES
from pegainfer.runtime.weights.jsonfile import parse_object, read_small_file
from pegainfer.runtime.weights.tensorfile import FileSet, MappedFile, TensorFile, TensorInfo

# Parsed JSON takes some ten times its text in memory; a shard of 10,000 tensors has a header of 1.5 MB.
MAX_HEADER_BYTES = 32 << 20
MAX_INDEX_BYTES = 32 << 20
MAX_RANK = 8
MAX_DIM = 1 << 48
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsFile(MappedFile):
    """One open safetensors file. `metadata` is the header's `__metadata__`, strings only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ModelFileError where the file is missing, truncated or contradicts itself."""
        super().__init__(path)
        self.metadata: Mapping[str, str] = {}
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        if self.size < 8:
            self._fail("file is too short for a safetensors header", expected="≥ 8 bytes", got=self.size)
        length = int.from_bytes(self._map[:8], "little")
        most = min(MAX_HEADER_BYTES, self.size - 8)
        if not 2 <= length <= most:
            self._fail("impossible header length", expected=f"2 to {most} bytes", got=length)
        header = parse_object(self._map[8 : 8 + length], f"{self._path}: header")
        self.metadata = self._string_map(header.pop("__metadata__", {}))
        base = 8 + length
        infos = [self._tensor_info(name, entry, base) for name, entry in header.items()]
        end, before = base, "the header"
        for info in sorted(infos, key=lambda t: (t.offset, t.nbytes)):
            if info.offset != end:
                self._fail(
                    "tensors overlap or leave a hole",
                    expected=f"{info.name} right after {before}, at byte {end}",
                    got=info.offset,
                )
            end, before = info.offset + info.nbytes, info.name
        if end != self.size:
            self._fail(
                "file length does not fit its header",
                expected=f"{end} bytes",
                got=self.size,
                remedy="the file is truncated or damaged: fetch it again",
            )
        self._tensors.update((t.name, t) for t in infos)

    def _tensor_info(self, name: str, entry: Any, base: int) -> TensorInfo:
        if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
            self._fail(f"tensor {name}: wrong header entry", expected="dtype, shape, data_offsets", got=entry)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is not str or dtype not in SAFETENSORS_DTYPES:
            self._fail(
                f"tensor {name}: unknown dtype", expected=" ".join(sorted(SAFETENSORS_DTYPES)), got=dtype
            )
        if not _naturals(shape, MAX_RANK, MAX_DIM):
            self._fail(f"tensor {name}: impossible shape", expected=f"at most {MAX_RANK} dims", got=shape)
        if not _naturals(offsets, 2, self.size - base) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._fail(
                f"tensor {name}: impossible data_offsets",
                expected=f"[start, stop] within {self.size - base} bytes of data",
                got=offsets,
                remedy="the file is truncated or damaged: fetch it again",
            )
        count = 1
        for d in shape:
            count *= d
        block = FORMATS[SAFETENSORS_DTYPES[dtype]]
        span = offsets[1] - offsets[0]
        if count % block.elements or block.nbytes(count) != span:
            self._fail(
                f"tensor {name}: bytes do not fit its shape {shape} in {dtype}",
                expected=f"{count * block.bytes / block.elements:.17g} bytes",
                got=span,
            )
        return TensorInfo(name, block.name, tuple(shape), base + offsets[0], span)

    def _string_map(self, value: Any) -> Mapping[str, str]:
        if type(value) is not dict or not all(type(v) is str for v in value.values()):
            self._fail("__metadata__ is wrong", expected="strings by name", got=value)
        return value

    def _fail(
        self, what: str, *, expected: object = None, got: object = None, remedy: str | None = None
    ) -> NoReturn:
        shown = got if isinstance(got, int | float) else f"{got!r:.200}"
        raise ModelFileError(what, expected=expected, got=shown, where=self._path, remedy=remedy)


class ShardedSafetensors(FileSet[SafetensorsFile]):
    """Shards named by an index; offers the tensors of the index's weight_map as one TensorFile."""

    def __init__(self, index: str | os.PathLike[str]) -> None:
        """Raises ModelFileError where index and shards are missing, wrong or contradict each other."""
        super().__init__(Path(index))
        self._shards: dict[str, SafetensorsFile] = {}
        try:
            for tensor, shard in self._weight_map().items():
                self._place(tensor, shard)
        except BaseException:
            self.close()
            raise

    def _weight_map(self) -> dict[str, str]:
        index = parse_object(read_small_file(self._path, MAX_INDEX_BYTES), str(self._path))
        weight_map = index.get("weight_map")
        if type(weight_map) is not dict or not weight_map:
            raise ModelFileError("index has no weight_map", expected="tensor -> shard", where=self._path)
        for tensor, shard in weight_map.items():
            # The name is joined to the model's folder: it must not lead out of it.
            plain = type(shard) is str and shard == os.path.basename(shard) and shard.endswith(".safetensors")
            if not plain or "\\" in shard or "\0" in shard or len(shard) > 255:
                raise ModelFileError(
                    f"shard of {tensor} is no plain file name",
                    expected="name.safetensors",
                    got=f"{shard!r:.200}",
                    where=self._path,
                )
        return weight_map

    def _place(self, tensor: str, shard_name: str) -> None:
        shard = self._shards.get(shard_name)
        if shard is None:
            path = self._path.parent / shard_name
            if not path.is_file():
                raise ModelFileError(
                    "shard is missing",
                    expected=shard_name,
                    where=self._path.parent,
                    remedy="fetch every shard that the index names",
                )
            shard = self._shards[shard_name] = SafetensorsFile(path)
            self._files.append(shard)
        info = shard.tensors.get(tensor)
        if info is None:
            raise ModelFileError(
                f"index says that {shard_name} holds {tensor}, but it does not", where=self._path
            )
        self._home[tensor] = shard
        self._tensors[tensor] = info


def open_safetensors(path: str | os.PathLike[str]) -> TensorFile:
    """A .safetensors file, an index, or a folder that holds either. Raises ModelFileError."""
    p = Path(path)
    if p.name.endswith(".json"):
        return ShardedSafetensors(p)
    if not p.is_dir():
        return SafetensorsFile(p)
    if (p / INDEX_NAME).is_file():
        return ShardedSafetensors(p / INDEX_NAME)
    found = sorted(f for f in p.iterdir() if f.suffix == ".safetensors")
    if (p / SINGLE_NAME) in found:
        return SafetensorsFile(p / SINGLE_NAME)
    if len(found) == 1:
        return SafetensorsFile(found[0])
    raise ModelFileError(
        "cannot tell which weights to read",
        expected=f"{INDEX_NAME}, {SINGLE_NAME} or exactly one .safetensors file",
        got=", ".join(f.name for f in found[:4]) or "no .safetensors file",
        where=p,
    )


def _naturals(value: Any, most_items: int, most: int) -> bool:
    """Whether it is a list of plain integers from 0 to `most` (a JSON true is no integer)."""
    return (
        type(value) is list
        and len(value) <= most_items
        and all(type(v) is int and 0 <= v <= most for v in value)
    )
