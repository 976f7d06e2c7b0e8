"""Encoded programs as C++ reads them: layouts from the declarations, without a most of operands or axes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import UnsupportedError
from pegainfer.kernels import headers
from pegainfer.kernels.cpu import instructions, library
from pegainfer.lower.cpu.backend import CpuBackend
from pegainfer.lower.cpu.encode import encode
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import Builder, OpCall
from pegainfer.ops.spec import In, OpSpec, Out, State
from pegainfer.ops.tensor import CACHED, Kind, Tensor

OPERANDS, AXES = 40, tuple("ABCDEFGHIJKLMNOPQRST")
WIDE = OpSpec(
    "wide",
    "an op with more operands, axes and attributes than any that has a kernel",
    (
        Out("out", " ".join(AXES[:10])),
        *(In(f"in{i}", " ".join(AXES[10:])) for i in range(OPERANDS - 3)),
        In("ids", "A", ("i32",), optional=True),
        State("kv", "A B 2 C D E", CACHED),
    ),
    attrs=tuple(f"attr{i}" for i in range(7)),
)
DRIVER = r"""
#include <cstdio>
#include "program.h"
int main() {
    std::vector<int64_t> program, words;
    for (int64_t word; std::fread(&word, 8, 1, stdin) == 1;) program.push_back(word);
    std::vector<pega::Instr> found;
    if (!pega::find_instructions(program, words, 2, found)) return 1;
    std::vector<void*> table;
    for (int64_t i = 0; i < 100; i++) table.push_back(reinterpret_cast<void*>(1000 + i));
    const int64_t sizes[] = {77, 88};
    for (const pega::Instr& in : found) {
        pega::resolve(in, table.data(), sizes);
        const auto a = in.args<pega::WideArgs>();
        std::printf("%d %d %lld %lld %lld %lld %lld %lld %g %g\n", in.op, in.kv_format, (long long)a.out,
                    (long long)a.in36, (long long)a.ids, (long long)a.kv, (long long)a.A, (long long)a.T,
                    a.attr0, a.attr6);
    }
}
"""


def test_headers_are_what_their_declarations_give() -> None:
    assert headers.stale() == []


def test_every_kernel_s_op_has_a_number_and_a_layout() -> None:
    text = instructions.header()
    assert len(set(instructions.OPCODES)) == len(instructions.OPCODES)
    assert text.count("Args {") == len(instructions.OPCODES)
    assert "    kLinear = 4,\n" in text
    assert "struct LinearArgs {\n    float* out;  // [T, N]\n    const float* a;  // [T, K]\n" in text
    assert "    const Packed* w;  // [N, K]\n    int64_t T, N, K;\n};\n" in text


def test_a_library_for_other_declarations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "declaration_hash", lambda: "0" * 64)
    with pytest.raises(
        UnsupportedError, match=r"other declarations.*remedy: python -m pegainfer\.kernels\.h"
    ):
        library.library.__wrapped__()


def wide_call(kv_dtype: str, *, ids: bool, first: str | int) -> tuple[OpCall, dict[Tensor, int]]:
    sizes: dict[str, str | int] = {a: i + 2 for i, a in enumerate(AXES)} | {"A": first, "T": "R"}
    tensors = {}
    for o in WIDE.operands:
        if o.name != "ids" or ids:
            shape = tuple(int(a) if a.isdigit() else sizes[a] for a in o.axes)
            dtype = {"ids": "i32", "kv": kv_dtype}.get(o.name, "f32")
            tensors[o.name] = Tensor(o.name, shape, dtype, Kind.STATE if o.name == "kv" else Kind.INPUT)
    attrs = {name: i + 0.5 for i, name in enumerate(WIDE.attrs)}
    call = OpCall.of(WIDE, attrs, **tensors)
    return call, {t: i for i, t in enumerate(tensors.values())}


def test_an_instruction_has_as_many_operands_axes_and_attributes_as_its_op(tmp_path: Path) -> None:
    (tmp_path / "program.h").write_text((library.SOURCES / "program.h").read_text())
    (tmp_path / "instructions.h").write_text(instructions.header(["wide"], {"wide": WIDE}))
    (tmp_path / "driver.cpp").write_text(DRIVER)
    program = tmp_path / "driver"
    subprocess.run(
        ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", program, tmp_path / "driver.cpp"],
        check=True,
    )
    names: list[str] = []
    code = b""
    for kv_dtype, ids, first in (("f32", True, 3), ("f16", False, "L"), ("f8_e4m3", False, "L")):
        call, places = wide_call(kv_dtype, ids=ids, first=first)
        code += encode(call, 0, places.__getitem__, names)
    assert names == ["R", "L"]
    words = 2 + OPERANDS + len(AXES) + len(WIDE.attrs)
    assert len(code) == 3 * 8 * words
    done = subprocess.run([program], input=code, capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == [
        "0 0 1000 1037 1038 1039 3 77 0.5 6.5",
        "0 1 1000 1037 0 1038 88 77 0.5 6.5",
        "0 2 1000 1037 0 1038 88 77 0.5 6.5",
    ]
    for broken in (code[:-8], b"\1" + code[1:]):
        assert subprocess.run([program], input=broken, capture_output=True).returncode == 1


def test_a_program_may_have_many_step_sizes() -> None:
    count, width = 40, 8
    b = Builder("many sizes")
    rng = np.random.default_rng(3)
    inputs, sizes = {}, {}
    for i in range(count):
        x = b.input(f"x{i}", f"T{i}", width, dtype="f32")
        out = b.output(f"out{i}", f"T{i}", width)
        weight = b.input(f"w{i}", width, dtype="f32")
        b.emit(RMS_NORM, {"eps": 1e-6}, out=out, x=x, weight=weight)
        sizes[f"T{i}"] = i % 5
        inputs[f"x{i}"] = rng.standard_normal((i % 5, width)).astype(np.float32)
        inputs[f"w{i}"] = np.full(width, i, np.float32)
    backend = CpuBackend({})
    try:
        outputs = backend.prepare(b.build(), {}, sizes).run(inputs, sizes)
        for i in range(count):
            x = inputs[f"x{i}"].astype(np.float64)
            want = i * x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6)
            np.testing.assert_allclose(outputs[f"out{i}"], want, rtol=1e-6, atol=1e-6)
    finally:
        backend.close()
