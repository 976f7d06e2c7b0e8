"""GGUF models in one file, or in parts as llama-gguf-split writes them: NAME-00001-of-00003.gguf and so on.

Each part is a GGUF file of its own. `split.no` counts from 0, `split.count` is the number of parts and
`split.tensors.count` that of all their tensors. The first part has the model's metadata.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.gguf import GGUF, GGUFFile, Value
from pegainfer.runtime.weights.tensorfile import FileSet

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_PARTS = 99_999  # what five digits of a name can count
_NAME = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MERGE = "or merge them with llama-gguf-split --merge"


def model_of(file_name: str) -> str | None:
    """What comes before '-00001-of-00003.gguf'; None where a name does not end so."""
    match = _NAME.fullmatch(file_name)
    return match["model"] if match else None


def group_parts(paths: Iterable[str]) -> list[tuple[str, ...]]:
    """GGUF files by the model that they hold: one file, or the parts of a split one in order."""
    models: dict[tuple[str, int], list[str]] = {}
    for path in sorted(paths):
        models.setdefault((model_of(path) or path, number_of_parts(path)), []).append(path)
    return [tuple(parts) for parts in models.values()]


def number_of_parts(file_name: str) -> int:
    """3 of '-00001-of-00003.gguf'; 1 where a name does not end so."""
    match = _NAME.fullmatch(file_name)
    return int(match["count"]) if match else 1


def part_name(model: str, number: int, count: int) -> str:
    """The file name of a part; `number` counts from 0."""
    return f"{model}-{number + 1:05}-of-{count:05}.gguf"


def open_gguf(path: str | os.PathLike[str]) -> GGUF:
    """A GGUF file, or all parts of the model that any one of its parts belongs to.

    Raises ModelFileError where a file is missing, truncated or contradicts itself or another part.
    """
    file = GGUFFile(path)
    try:
        if _number(file, COUNT, 1, MAX_PARTS) == 1:
            return file
        return SplitGGUF(file)
    except BaseException:
        file.close()
        raise


class SplitGGUF(FileSet[GGUFFile]):
    """The parts of one model as one file. `path` is that of the first part."""

    def __init__(self, given: GGUFFile) -> None:
        """Takes over one open part and opens the others beside it. Raises ModelFileError."""
        count, number = _number(given, COUNT, 1, MAX_PARTS), _number(given, NUMBER, 0, MAX_PARTS - 1)
        folder, model = given.path.parent, model_of(given.path.name)
        if model is None or given.path.name != part_name(model, number, count):
            raise ModelFileError(
                "the name of a part of a split GGUF does not lead to the other parts",
                expected=part_name(model or given.path.stem, number, count),
                got=given.path.name,
                where=given.path,
                remedy=f"give the parts their names back, {MERGE}",
            )
        paths = [folder / part_name(model, i, count) for i in range(count)]
        super().__init__(paths[0])
        try:
            for i, path in enumerate(paths):
                self._add(given if i == number else _open_part(path, paths, i, count))
            self._check_number_of_tensors()
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self._files[0].metadata

    def _add(self, part: GGUFFile) -> None:
        self._files.append(part)
        for name in part.tensors:
            if name in self._home:
                raise ModelFileError(
                    f"tensor {name} is in two parts of a split GGUF",
                    got=self._home[name].path.name,
                    where=part.path,
                    remedy="fetch every part from the same revision",
                )
            self._home[name] = part
            self._tensors[name] = part.tensors[name]

    def _check_number_of_tensors(self) -> None:
        expected = self.metadata.get(TENSORS, len(self._tensors))
        if expected != len(self._tensors):
            raise ModelFileError(
                "the parts of a split GGUF do not hold all tensors",
                expected=expected if isinstance(expected, int) else "a number",
                got=len(self._tensors),
                where=self.path,
                remedy="fetch every part from the same revision",
            )


def _open_part(path: Path, paths: list[Path], number: int, count: int) -> GGUFFile:
    if not path.is_file():
        missing = [p.name for p in paths if not p.is_file()]
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(
            "a part of a split GGUF is missing",
            expected=missing[0] + others,
            got=f"{count - len(missing)} of {count} parts",
            where=path.parent,
            remedy=f"fetch every part into one folder, {MERGE}",
        )
    part = GGUFFile(path)
    found = _number(part, NUMBER, 0, MAX_PARTS - 1), _number(part, COUNT, 1, MAX_PARTS)
    if found != (number, count):
        part.close()
        raise ModelFileError(
            "a part of a split GGUF is not what its name says",
            expected=f"{NUMBER} {number}, {COUNT} {count}",
            got=f"{NUMBER} {found[0]}, {COUNT} {found[1]}",
            where=path,
            remedy=f"fetch the part anew, {MERGE}",
        )
    return part


def _number(file: GGUFFile, key: str, least: int, most: int) -> int:
    """A key of the split; `least` where the file has none."""
    value = file.metadata.get(key, least)
    if type(value) is not int or not least <= value <= most:
        shown = value if isinstance(value, int | float | str) else type(value).__name__
        raise ModelFileError(f"{key} is wrong", expected=f"{least} to {most}", got=shown, where=file.path)
    return value
