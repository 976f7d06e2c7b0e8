"""The safetensors reader, single and sharded: right values from right files, clear errors from wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.safetensors import (
    INDEX_NAME,
    SafetensorsFile,
    ShardedSafetensors,
    open_safetensors,
)
from tests.support.modelfiles import safetensors_bytes, safetensors_file

A = np.arange(6, dtype=np.float32)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused(tmp_path: Path, data: bytes, match: str | None = None) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=match) as e:
        SafetensorsFile(path)
    assert str(path) in str(e.value)


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", [2, 2], [24, 32]),
        "a": entry("F32", [2, 3], [0, 24]),
        "scalar": entry("I64", [], [32, 40]),
        "none": entry("F16", [0, 4], [40, 40]),
        "f8": entry("F8_E4M3", [3], [40, 43]),
        "f4": entry("F4", [2], [43, 44]),
    }
    path.write_bytes(safetensors_bytes(header, A.tobytes() + bytes(range(20))))
    with SafetensorsFile(path) as f:
        assert f.metadata == {"format": "pt"}
        assert {n: (t.format, t.shape, t.nbytes) for n, t in f.tensors.items()} == {
            "a": ("f32", (2, 3), 24),
            "b": ("bf16", (2, 2), 8),
            "scalar": ("i64", (), 8),
            "none": ("f16", (0, 4), 0),
            "f8": ("f8_e4m3", (3,), 3),
            "f4": ("f4", (2,), 1),
        }
        assert f.part("a").bytes().view("<f4").tolist() == A.tolist()
        assert f.part("b").bytes().tobytes() == bytes(range(8))
        assert f.part("none").bytes().size == 0
        assert not f.part("a").bytes().flags.writeable


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = safetensors_file({"a": ("F32", [6], A.tobytes()), "b": ("U8", [3], b"xyz")})
    for length in range(len(whole)):
        refused(tmp_path, whole[:length])


def test_header_lies(tmp_path: Path) -> None:
    good = {"a": entry()}
    refused(tmp_path, safetensors_bytes(good, bytes(8), length=2**63), "impossible header length")
    refused(tmp_path, safetensors_bytes(good, bytes(8), length=0), "impossible header length")
    refused(tmp_path, safetensors_bytes(b"[1, 2]", b""), "not a valid JSON object; got list")
    refused(tmp_path, safetensors_bytes(b'{"a": \xff}', b""), "not a valid JSON object")
    refused(tmp_path, safetensors_bytes(b"[" * 100_000, b""), "not a valid JSON object")
    refused(tmp_path, safetensors_bytes(b'{"a": NaN}', b""), "NaN is no JSON number")
    same = json.dumps(entry()).encode()
    refused(tmp_path, safetensors_bytes(b'{"a": %s, "a": %s}' % (same, same), bytes(8)), "'a' is given twice")
    refused(tmp_path, safetensors_bytes(good, bytes(9)), r"expected \d+ bytes; got \d+")
    refused(tmp_path, safetensors_bytes({"__metadata__": {"a": 1}}, b""), "__metadata__ is wrong")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (7, "wrong header entry"),
        ({"dtype": "F32", "shape": [2]}, "wrong header entry"),
        (entry() | {"more": 1}, "wrong header entry"),
        (entry("F31"), "unknown dtype"),
        (entry(dtype=["F32"]), "unknown dtype"),  # type: ignore[arg-type]
        (entry(shape=[-2]), "impossible shape"),
        (entry(shape=[True, 2]), "impossible shape"),
        (entry(shape=[2.0]), "impossible shape"),
        (entry(shape=[1] * 9), "impossible shape"),
        (entry(shape=[2**60, 2**60]), "impossible shape"),
        (entry(shape=2), "impossible shape"),
        (entry(shape=[2**40] * 8), "bytes do not fit its shape"),
        (entry(shape=[3]), r"bytes do not fit its shape \[3\] in F32; expected 12 bytes; got 8"),
        (entry("F4", [15]), "bytes do not fit its shape"),
        (entry(offsets=[0, 9]), "impossible data_offsets"),
        (entry(offsets=[8, 0]), "impossible data_offsets"),
        (entry(offsets=[0]), "impossible data_offsets"),
        (entry(offsets=[0, 4, 8]), "impossible data_offsets"),
        (entry(offsets=[0, "8"]), "impossible data_offsets"),
        (entry(offsets=[-8, 0]), "impossible data_offsets"),
        (entry(offsets=[0, 2**70]), "impossible data_offsets"),
    ],
)
def test_tensor_lies(tmp_path: Path, wrong: Any, match: str) -> None:
    refused(tmp_path, safetensors_bytes({"t": wrong}, bytes(8)), match)


def test_overlap_and_hole(tmp_path: Path) -> None:
    overlap = {"a": entry(offsets=[0, 8]), "b": entry(offsets=[4, 12])}
    refused(tmp_path, safetensors_bytes(overlap, bytes(12)), "overlap or leave a hole.*b right after a")
    hole = {"a": entry(offsets=[0, 8]), "b": entry(offsets=[12, 20])}
    refused(tmp_path, safetensors_bytes(hole, bytes(20)), "overlap or leave a hole")
    refused(tmp_path, safetensors_bytes({"a": entry(offsets=[8, 16])}, bytes(16)), "right after the header")


def write_shards(folder: Path, weight_map: dict[str, Any]) -> Path:
    (folder / "x-1.safetensors").write_bytes(safetensors_file({"a": ("F32", [6], A.tobytes())}))
    (folder / "x-2.safetensors").write_bytes(
        safetensors_file({"b": ("U8", [3], b"xyz"), "c": ("U8", [1], b"c")})
    )
    index = folder / INDEX_NAME
    index.write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": weight_map}))
    return index


def test_shards_read_as_one(tmp_path: Path) -> None:
    index = write_shards(tmp_path, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    for place in (index, tmp_path):
        with open_safetensors(place) as f:
            assert isinstance(f, ShardedSafetensors) and f.path == index
            assert sorted(f.tensors) == ["a", "b"]
            assert f.part("b").bytes().tobytes() == b"xyz"
            (extent,) = f.part("b").extents
            assert isinstance(extent.source, SafetensorsFile)
            assert extent.source.path.name == "x-2.safetensors"
            assert extent.source.path.read_bytes()[extent.offset : extent.end] == b"xyz"
            assert f.part("a").bytes().view("<f4").tolist() == A.tolist()
            with pytest.raises(ModelFileError, match="tensor is missing; expected 'c'; got 2 other"):
                f.part("c").bytes()


def test_the_index_decides_which_file_a_tensor_comes_from(tmp_path: Path) -> None:
    """Not a whole file that was left beside the shards, nor an older copy within one of them."""
    stale = np.zeros_like(A).tobytes()
    write_shards(tmp_path, {"a": "overlay.safetensors", "b": "x-2.safetensors"})
    for name, content in {"model": stale, "x-1": stale, "overlay": A.tobytes()}.items():
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors_file({"a": ("F32", [6], content)}))
    with open_safetensors(tmp_path) as f:
        assert f.part("a").bytes().view("<f4").tolist() == A.tolist()


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({}, "no weight_map"),
        ([], "no weight_map"),
        ({"a": "x-9.safetensors"}, "shard is missing; expected x-9.safetensors.*fetch every shard"),
        ({"b": "x-1.safetensors"}, "x-1.safetensors holds b, but it does not"),
        ({"a": "../x-1.safetensors"}, "no plain file name"),
        ({"a": "/etc/x.safetensors"}, "no plain file name"),
        ({"a": "sub/x-1.safetensors"}, "no plain file name"),
        ({"a": "..\\x.safetensors"}, "no plain file name"),
        ({"a": "x\0.safetensors"}, "no plain file name"),
        ({"a": "passwd"}, "no plain file name"),
        ({"a": 3}, "no plain file name"),
    ],
)
def test_index_lies(tmp_path: Path, weight_map: dict[str, Any], match: str) -> None:
    index = write_shards(tmp_path, weight_map)
    with pytest.raises(ModelFileError, match=match) as e:
        ShardedSafetensors(index)
    assert str(tmp_path) in str(e.value)


def test_folder_choices(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot tell which weights to read.*got no .safetensors file"):
        open_safetensors(tmp_path)
    one = safetensors_file({"a": ("F32", [6], A.tobytes())})
    (tmp_path / "other.safetensors").write_bytes(one)
    with open_safetensors(tmp_path) as f:
        assert f.path.name == "other.safetensors"
    (tmp_path / "more.safetensors").write_bytes(one)
    with pytest.raises(ModelFileError, match=r"got more.safetensors, other.safetensors"):
        open_safetensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(one)
    with open_safetensors(tmp_path) as f:
        assert f.path.name == "model.safetensors"


def test_rows_are_read_without_mapping_or_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_file({"a": ("F32", [3, 2], A.tobytes())}))
    with SafetensorsFile(path) as f:
        part, into = f.part("a"), np.empty(16, np.uint8)
        part.take(0, [range(0, 3, 2)]).read(into)
        assert into.view("<f4").tolist() == [0, 1, 4, 5]
        monkeypatch.setattr(SafetensorsFile, "view", lambda _: pytest.fail("mapped"))
        part.take(0, [range(2, 3), range(0, 1)]).read(into)
        assert into.view("<f4").tolist() == [4, 5, 0, 1]
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(
            ModelFileError, match=r"became shorter after it was opened; .* got \d+; at .*m.safe"
        ):
            part.take(0, [range(1, 3)]).read(into)
    with pytest.raises(ModelFileError, match="weights file was closed"):
        part.take(0, [range(1)]).read(into[:8])
