"""Writes the headers that are generated from Python declarations: `python -m pegainfer.kernels.headers`.
With `--check` it writes nothing and fails where one of them differs from its declaration.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pegainfer.kernels.cpu import instructions
from pegainfer.runtime.cuda import arguments, lora_arguments
from pegainfer.runtime.cuda.layout import Layout

ROOT = Path(__file__).parent
# Words of a pointer's type that are no struct of ours.
_KNOWN = {
    "const", "void", "int", "float", "unsigned", "long", "uint32_t", "uint8_t", "float2", "float4", "int4",
    "uint2", "int2",
}  # fmt: skip
_CUDA_HEAD = """\
// Generated from runtime/cuda/{}.py by `python -m pegainfer.kernels.headers`; do not edit.
// Long because it has every struct that Python passes.
// clang-format off
#pragma once
#include <cstdint>
"""


def structs(module: str, layouts: Sequence[Layout]) -> str:
    """The text of cuda/include/<module>.cuh: structs that kernels get from Python."""
    return "\n".join([_CUDA_HEAD.format(module), *(_struct(layout) for layout in layouts)])


def _struct(layout: Layout) -> str:
    space, _, name = layout.name.rpartition("::")
    pointers = [f.c_type for f in layout.fields if f.inner is None and f.kind == "ptr"]
    named = {word for text in pointers for word in re.findall(r"\w+", text)}
    lines = [f"namespace {space} {{"] if space else []
    lines += [f"struct {word};" for word in sorted(named - _KNOWN - {layout.template})]
    lines.append(f"// {layout.doc}")
    lines += [f"template <typename {layout.template}>"] if layout.template else []
    lines.append(f"struct {name} {{")
    for f in layout.fields:
        count = f"[{f.count}]" if f.count else ""
        lines.append(f"    {f.c_type} {f.name}{count};" + (f"  // {f.note}" if f.note else ""))
    made = f"{name}<float>" if layout.template else name
    lines += ["};", f"static_assert(sizeof({made}) == {layout.size});"]
    lines += [f"}}  // namespace {space}"] if space else []
    return "\n".join(lines) + "\n"


HEADERS: dict[Path, Callable[[], str]] = {
    ROOT / "cpu" / "csrc" / "instructions.h": instructions.header,
    ROOT / "cuda" / "include" / "arguments.cuh": partial(structs, "arguments", arguments.LAYOUTS),
    ROOT / "cuda" / "include" / "lora_arguments.cuh": partial(
        structs, "lora_arguments", lora_arguments.LAYOUTS
    ),
}


def stale() -> list[Path]:
    """Headers whose text is not what their declaration gives."""
    return [p for p, text in HEADERS.items() if not p.is_file() or p.read_text() != text()]


def main() -> int:
    """Writes stale headers and prints their paths; returns 1 where it only checks and finds one."""
    checks = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not checks:
        print("usage: python -m pegainfer.kernels.headers [--check]", file=sys.stderr)
        return 2
    found = stale()
    for path in found:
        if checks:
            remedy = "remedy: python -m pegainfer.kernels.headers"
            print(f"{path.relative_to(ROOT)} differs from its declaration; {remedy}", file=sys.stderr)
        else:
            path.write_text(HEADERS[path]())
            print(path)
    return int(checks and bool(found))


if __name__ == "__main__":
    sys.exit(main())
