"""Argument structs: what Python packs lies where C++ looks for it, and every member is given by name."""

from __future__ import annotations

import subprocess
from pathlib import Path
from struct import calcsize
from types import ModuleType

import pytest

from pegainfer.contract.errors import OpError
from pegainfer.kernels.headers import structs
from pegainfer.runtime.cuda import arguments, lora_arguments
from pegainfer.runtime.cuda.arguments import PASS_LAYERS
from pegainfer.runtime.cuda.layout import Layout, packing

INNER = Layout("Inner", "An inner struct.", "int* p  // [N]\nint n\nint m")
OUTER = Layout(
    "space::Outer", "An outer struct.", "int first\nInner parts[3]\nfloat last  // seconds", (INNER,)
)
# What nvcc knows by itself.
VECTORS = """
struct float2 { float v[2]; };
struct float4 { float v[4]; };
struct uint2 { unsigned v[2]; };
struct int2 { int v[2]; };
struct int4 { int v[4]; };
"""


def offsets(layout: Layout) -> list[int]:
    """Where Python packs each member."""
    found, kinds = [], list(layout.kinds)
    taken = 0
    for f in layout.fields:
        found.append(calcsize(packing(kinds[: taken + 1])[:-2]) - calcsize(packing([kinds[taken]])[:-2]))
        taken += 1 if f.inner is None else len(f.inner.kinds) * max(1, f.count)
    return found


@pytest.mark.parametrize("module", [arguments, lora_arguments], ids=lambda m: m.__name__.rpartition(".")[2])
def test_members_lie_where_cpp_has_them(module: ModuleType, tmp_path: Path) -> None:
    lines = []
    for layout in module.LAYOUTS:
        name = f"{layout.name}<float>" if layout.template else layout.name
        lines += [f'std::printf("%zu ", offsetof({name}, {f.name}));' for f in layout.fields]
        lines.append(f'std::printf("%zu\\n", sizeof({name}));')
    body = "\n".join(lines)
    (tmp_path / "arguments.h").write_text(VECTORS + structs("", module.LAYOUTS))
    (tmp_path / "main.cpp").write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "arguments.h"\nint main() {{\n{body}\n}}\n'
    )
    program = tmp_path / "main"
    subprocess.run(["g++", "-std=c++17", "-o", program, tmp_path / "main.cpp"], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [[int(n) for n in line.split()] for line in printed.splitlines()] == [
        [*offsets(layout), layout.size] for layout in module.LAYOUTS
    ]


def test_values_come_in_the_order_of_the_members() -> None:
    parts = [{"m": 3, "n": 2, "p": 100}, {"p": None, "n": 4, "m": 5}]
    assert OUTER.values({"last": 0.5, "parts": parts, "first": 1}) == (1, 100, 2, 3, 0, 4, 5, 0, 0, 0, 0.5)
    assert OUTER.kinds == ("i32", *("ptr", "i32", "i32") * 3, "f32") and OUTER.size == 64


def test_members_that_are_missing_unknown_or_too_great_are_refused() -> None:
    part = {"p": 1, "n": 2, "m": 3}
    with pytest.raises(OpError, match=r"members of space::Outer; .*no last, size unknown"):
        OUTER.values({"first": 1, "parts": [], "size": 3})
    with pytest.raises(OpError, match=r"members of Inner; expected p n m; got no n, no unknown"):
        OUTER.values({"first": 1, "parts": [{"p": 1, "m": 3}], "last": 0.0})
    with pytest.raises(OpError, match=r"space::Outer: parts; expected at most 3; got 4"):
        OUTER.values({"first": 1, "parts": [part] * 4, "last": 0.0})
    with pytest.raises(OpError, match=r"Inner: n; expected -2147483648 to 2147483647; got 2147483648"):
        INNER.values(part | {"n": 1 << 31})
    with pytest.raises(OpError, match=r"pass::Layers: layer; expected at most 80; got 81"):
        PASS_LAYERS.values({"layer": [{}] * 81})


def test_declarations_that_cannot_be_packed_are_refused() -> None:
    for members in ("short a", "int a[3]", "int"):
        with pytest.raises(OpError, match="member of S; expected a pointer, a number or a struct"):
            Layout("S", "", members)
    padded = Layout("Padded", "", "int* p\nint n")
    with pytest.raises(OpError, match="member of S; expected a struct without padding; got Padded one"):
        Layout("S", "", "Padded one", (padded,))
