"""The GGUF reader: right values from right files, one clear error from wrong ones."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.gguf import GGUFFile, StringArray
from tests.support.modelfiles import GGML, GGUFTensor, Typed, gguf_bytes, gguf_string

METADATA = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.u32": 7,
    "a.f32": 0.5,
    "a.i64": Typed(11, struct.pack("<q", -(2**62))),
    "a.u8": Typed(0, b"\xff"),
    "tokens": ["<s>", "é", "", "a b"],
    "scores": np.array([0.25, -1.0], np.float32),
    "flags": np.array([True, False, True]),
    "empty": [],
}
Q4 = bytes(range(40))
TENSORS = [
    GGUFTensor("w.q4", GGML["q4_1"], (2, 32), Q4),
    GGUFTensor("w.f32", GGML["f32"], (3,), np.arange(3, dtype=np.float32).tobytes()),
    GGUFTensor("w.bf16", GGML["bf16"], (1, 2, 2, 2), bytes(range(16))),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def refused(path: Path, data: bytes, match: str) -> None:
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=match) as e:
        GGUFFile(path)
    assert str(path) in str(e.value)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 1, 8, 64])
def test_reads_what_was_written(path: Path, version: int, alignment: int | None) -> None:
    extra = {} if alignment is None else {"general.alignment": alignment}
    path.write_bytes(gguf_bytes(METADATA | extra, TENSORS, version=version, alignment=alignment or 32))
    with GGUFFile(path) as g:
        m = g.metadata
        assert (g.version, g.alignment) == (version, alignment or 32)
        assert (m["general.architecture"], m["a.bool"], m["a.u32"], m["a.f32"]) == ("llama", True, 7, 0.5)
        assert (m["a.i64"], m["a.u8"]) == (-(2**62), 255)
        assert [type(m[k]) for k in ("a.bool", "a.u32", "a.f32", "a.i64")] == [bool, int, float, int]
        assert list(m["tokens"]) == ["<s>", "é", "", "a b"] and len(m["tokens"]) == 4
        assert m["tokens"][1] == "é" and m["tokens"][1:3] == ["é", ""]
        assert m["scores"].tolist() == [0.25, -1.0] and m["flags"].tolist() == [True, False, True]
        assert list(m["empty"]) == []
        assert {n: (t.format, t.shape, t.nbytes) for n, t in g.tensors.items()} == {
            "w.q4": ("q4_1", (2, 32), 40),
            "w.f32": ("f32", (3,), 12),
            "w.bf16": ("bf16", (1, 2, 2, 2), 16),
        }
        assert g.part("w.q4").bytes().tobytes() == Q4
        assert g.part("w.f32").bytes().view("<f4").tolist() == [0.0, 1.0, 2.0]
        assert not g.part("w.q4").bytes().flags.writeable


def test_close_is_idempotent_and_leaves_held_views_valid(path: Path) -> None:
    path.write_bytes(gguf_bytes(METADATA, TENSORS))
    g = GGUFFile(path)
    view, tokens = g.part("w.q4").bytes(), g.metadata["tokens"]
    assert isinstance(tokens, StringArray)
    g.close()
    g.close()
    assert view.tobytes() == Q4 and next(iter(tokens)) == "<s>"
    assert g.metadata["general.architecture"] == "llama" and "tokens" not in g.metadata
    with pytest.raises(ModelFileError, match="closed"):
        g.part("w.q4").bytes()


def test_missing_tensor_is_named(path: Path) -> None:
    path.write_bytes(gguf_bytes({}, TENSORS))
    with GGUFFile(path) as g, pytest.raises(ModelFileError, match=r"expected 'nope'; got 3 other tensors"):
        g.part("nope").bytes()


def test_metadata_needs_no_numpy(path: Path) -> None:
    """The front process reads the tokenizer alone and should not pay for NumPy's import."""
    path.write_bytes(gguf_bytes(METADATA, TENSORS))
    code = (
        "import sys; from pegainfer.runtime.weights.gguf import GGUFFile; "
        "print(GGUFFile(sys.argv[1]).metadata['scores'].tolist(), 'numpy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[0.25, -1.0] False"


def test_opening_decodes_no_string_array(path: Path) -> None:
    words = [f"token{i}" for i in range(50_000)]
    path.write_bytes(gguf_bytes({"tokens": words, "merges": words}))
    tracemalloc.start()
    try:
        with GGUFFile(path) as g:
            _, peak = tracemalloc.get_traced_memory()
            assert peak < 200_000
            assert list(g.metadata["tokens"]) == words
    finally:
        tracemalloc.stop()


def test_missing_empty_and_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        GGUFFile(tmp_path / "no.gguf")
    with pytest.raises(ModelFileError, match="Is a directory"):
        GGUFFile(tmp_path)
    refused(tmp_path / "empty.gguf", b"", "empty")


def test_every_truncation_is_refused(path: Path) -> None:
    whole = gguf_bytes(METADATA, TENSORS)
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            GGUFFile(path)


def test_header_lies(path: Path) -> None:
    refused(path, b"GGML" + bytes(40), "not a GGUF file")
    refused(path, b"GG", "not a GGUF file")
    refused(
        path, gguf_bytes({}, version=1), r"unsupported GGUF version; expected 2 or 3, little-endian; got 1"
    )
    refused(path, gguf_bytes({}, version=3 << 24), "big-endian")
    refused(path, gguf_bytes({}, tensor_count=2**63), "tensor count is impossible")
    refused(path, gguf_bytes({}, tensor_count=2) + bytes(10), "tensor count is impossible.*truncated")
    refused(path, gguf_bytes(METADATA, key_count=2**40), "metadata count is impossible")


@pytest.mark.parametrize("value", [0, 3, 48, 1 << 21, -8, 32.0, "32", True])
def test_alignment_must_be_a_power_of_two(path: Path, value: object) -> None:
    stored = Typed(5, struct.pack("<i", value)) if value == -8 else value
    refused(path, gguf_bytes({"general.alignment": stored}), "general.alignment is wrong")


def test_metadata_lies(path: Path) -> None:
    refused(path, gguf_bytes([("a", 1), ("a", 2)]), "given twice; got 'a'")
    refused(path, gguf_bytes([("", 1)]), "empty or given twice")
    refused(path, gguf_bytes({"a": Typed(13, bytes(8))}), r"metadata 'a': unknown metadata type; .* got 13")
    refused(path, gguf_bytes({"a": Typed(7, b"\x02")}), "not a bool")
    refused(path, gguf_bytes({"a": Typed(9, struct.pack("<IQ", 7, 2) + b"\x01\x02")}), "not a bool")
    refused(path, gguf_bytes({"a": Typed(9, struct.pack("<IQ", 9, 1) + bytes(12))}), "arrays of arrays")
    refused(path, gguf_bytes({"a": Typed(9, struct.pack("<IQ", 13, 1) + bytes(8))}), "unknown metadata type")
    refused(path, gguf_bytes({"a": Typed(9, struct.pack("<IQ", 4, 2**61))}), "array length is impossible")
    refused(path, gguf_bytes({"a": Typed(9, struct.pack("<IQ", 8, 2**61))}), "array length is impossible")
    refused(path, gguf_bytes({"a": Typed(8, struct.pack("<Q", 2**63))}), "too long")
    refused(path, gguf_bytes({"a": Typed(8, gguf_string(b"\xff\xfe"))}), "not UTF-8")
    two = struct.pack("<IQ", 8, 2) + gguf_string("x") + struct.pack("<Q", 2**63)
    refused(path, gguf_bytes({"a": Typed(9, two)}), "strings end past the file")
    early = struct.pack("<IQQQ", 8, 2, 2**64 - 1, 0)
    refused(path, gguf_bytes({"a": Typed(9, early)}), "strings end past the file")


def test_a_token_that_is_not_utf8_is_named_when_it_is_read(path: Path) -> None:
    raw = struct.pack("<IQ", 8, 2) + gguf_string("x") + gguf_string(b"\xc3")
    path.write_bytes(gguf_bytes({"tokens": Typed(9, raw)}))
    with GGUFFile(path) as g, pytest.raises(ModelFileError, match=r"not UTF-8; .*'tokens'\[1\]"):
        g.metadata["tokens"].to_list()


def test_tensor_lies(path: Path) -> None:
    def one(
        kind: int = 0, shape: tuple[int, ...] = (4,), offset: int | None = None, name: str = "t"
    ) -> bytes:
        return gguf_bytes({}, [GGUFTensor(name, kind, shape, bytes(64), offset)])

    refused(path, one(kind=4), r"tensor 't': unknown ggml type; .* got 4")
    refused(path, one(kind=2**32 - 1), "unknown ggml type")
    refused(path, one(shape=()), "wrong number of dims")
    refused(path, one(shape=(1, 1, 1, 1, 1)), "wrong number of dims")
    refused(path, one(shape=(0,)), "impossible shape")
    refused(path, one(shape=(17,)), "'?t'? ends past the file")
    refused(path, one(shape=(2**63, 2**63, 2**63, 2**63)), "ends past the file")
    refused(path, one(kind=GGML["q4_1"], shape=(2, 33)), r"multiple of 32 \(q4_1 blocks\); got \[33, 2\]")
    refused(path, one(offset=4), "offset is not aligned")
    refused(path, one(offset=2**63), "ends past the file")
    refused(path, one(name="n" * 300), "tensor name is too long")
    twice = [GGUFTensor("t", 0, (8,), bytes(32)), GGUFTensor("t", 0, (8,), bytes(32))]
    refused(path, gguf_bytes({}, twice), "given twice; got 't'")
    overlap = [GGUFTensor("a", 0, (16,), bytes(64)), GGUFTensor("b", 0, (8,), bytes(32), offset=32)]
    refused(path, gguf_bytes({}, overlap), "tensor b overlaps a")
