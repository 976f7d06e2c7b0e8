"""GGUF models in parts: any part opens all of them, and what does not fit together is one clear error."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.gguf_split import model_of, open_gguf, part_name
from tests.support.modelfiles import GGML, GGUFTensor, Typed, gguf_bytes

NAMES = [part_name("m", i, 3) for i in range(3)]


def tensor(name: str, value: float) -> GGUFTensor:
    return GGUFTensor(name, GGML["f32"], (2,), np.full(2, value, np.float32).tobytes())


def u16(value: int) -> Typed:
    return Typed(2, struct.pack("<H", value))


def write(folder: Path, *, count: int = 3, changed: Mapping[int, dict[str, object]] | None = None) -> None:
    """Parts as llama-gguf-split writes them: the first has the metadata, here without tensors."""
    tensors = [[], [tensor("a", 1), tensor("b", 2)], [tensor("c", 3)]]
    for i, name in enumerate(NAMES):
        split = {"split.no": u16(i), "split.count": u16(count), "split.tensors.count": 3}
        model = {"general.architecture": "llama"} if i == 0 else {}
        keys = model | split | (changed or {}).get(i, {})
        (folder / name).write_bytes(gguf_bytes(keys, tensors[i]))


@pytest.mark.parametrize("given", NAMES)
def test_any_part_opens_the_model(tmp_path: Path, given: str) -> None:
    write(tmp_path)
    with open_gguf(tmp_path / given) as file:
        assert file.path == tmp_path / NAMES[0]
        assert file.metadata["general.architecture"] == "llama"
        values = {name: file.part(name).bytes().view("<f4").tolist() for name in file.tensors}
        assert values == {"a": [1, 1], "b": [2, 2], "c": [3, 3]}
        with pytest.raises(ModelFileError, match=r"tensor is missing; expected 'd'; got 3 other tensors"):
            file.part("d")
        part = file.part("a")
    assert file.metadata["general.architecture"] == "llama"
    with pytest.raises(ModelFileError, match="was closed"):
        part.bytes()


def test_a_whole_file_is_opened_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / NAMES[1]
    for keys in ({}, {"split.no": u16(0), "split.count": u16(1)}):
        path.write_bytes(gguf_bytes(keys, [tensor("a", 1)]))
        with open_gguf(path) as file:
            assert list(file.tensors) == ["a"] and file.path == path


@pytest.mark.parametrize(
    ("missing", "match"),
    [
        (NAMES[:1], rf"a part of a split GGUF is missing; expected {NAMES[0]}; got 2 of 3 parts"),
        (NAMES[:2], rf"expected {NAMES[0]} and 1 more; got 1 of 3 parts; .*fetch every part.*--merge"),
    ],
)
def test_missing_parts_are_named(tmp_path: Path, missing: list[str], match: str) -> None:
    write(tmp_path)
    for name in missing:
        (tmp_path / name).unlink()
    with pytest.raises(ModelFileError, match=match):
        open_gguf(tmp_path / NAMES[2])


@pytest.mark.parametrize("name", ["model.gguf", "m-00001-of-00004.gguf", "m-00002-of-00003.gguf"])
def test_a_renamed_part(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / NAMES[0]).rename(tmp_path / name)
    stem = name.partition("-0")[0].removesuffix(".gguf")
    match = rf"does not lead to the other parts; expected {stem}-00001-of-00003.gguf; got {name}; .*--merge"
    with pytest.raises(ModelFileError, match=match):
        open_gguf(tmp_path / name)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({2: {"split.no": u16(1)}}, r"not what its name says; expected split.no 2, .*; got split.no 1"),
        ({2: {"split.count": u16(4)}}, r"not what its name says; .*; got split.no 2, split.count 4"),
        ({0: {"split.tensors.count": 4}}, r"do not hold all tensors; expected 4; got 3"),
        ({0: {"split.tensors.count": "many"}}, r"do not hold all tensors; expected a number; got 3"),
        ({0: {"split.count": u16(0)}}, r"split.count is wrong; expected 1 to 99999; got 0"),
        ({0: {"split.count": "3"}}, r"split.count is wrong; expected 1 to 99999; got 3"),
        ({0: {"split.no": 0.5}}, r"split.no is wrong; expected 0 to 99998; got 0.5"),
    ],
)
def test_parts_that_contradict_each_other(
    tmp_path: Path, changed: dict[int, dict[str, object]], match: str
) -> None:
    write(tmp_path, changed=changed)
    with pytest.raises(ModelFileError, match=match):
        open_gguf(tmp_path / NAMES[0])


def test_a_tensor_in_two_parts_and_a_truncated_part(tmp_path: Path) -> None:
    write(tmp_path)
    last = tmp_path / NAMES[2]
    keys = {"split.no": u16(2), "split.count": u16(3)}
    last.write_bytes(gguf_bytes(keys, [tensor("a", 3)]))
    with pytest.raises(
        ModelFileError, match=rf"tensor a is in two parts .*; got {NAMES[1]}; at .*{NAMES[2]}"
    ):
        open_gguf(tmp_path / NAMES[0])
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(ModelFileError, match=rf"{NAMES[2]}.*truncated"):
        open_gguf(tmp_path / NAMES[0])


def test_what_a_name_says() -> None:
    assert model_of("M-Q4_K_M-00002-of-00003.gguf") == "M-Q4_K_M"
    assert [model_of(n) for n in ("M.gguf", "M-2-of-3.gguf", "-00001-of-00002.gguf")] == [None] * 3
