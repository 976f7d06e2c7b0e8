"""Compiles one variant of a Triton source to a cubin, and prints its figures for the manifest as JSON:
`python -m pegainfer.kernels.triton.compile SOURCE VARIANT ARCH OUT FEATURE=VALUE …`. Needs Triton, no GPU.

It runs in a process of its own, because Triton keeps state in module globals and its imports are slow and
large.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DTYPES = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def main(source: str, variant: str, arch: str, out: str, *features: str) -> None:
    import os

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        report = compile_variant(Path(source), variant, arch, Path(out), dict(f.split("=") for f in features))
    print(json.dumps(report))


def compile_variant(
    source: Path, variant: str, arch: str, out: Path, features: dict[str, str]
) -> dict[str, int]:
    """Writes the cubin; its entry bears the variant's name.

    Args:
        features: of the variant's line: constants of the kernel in lower case, and `warps`, `stages`.

    Returns registers, stack and spills as the assembler has them, and dynamic shared memory in bytes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.util.spec_from_file_location(f"triton_source_{source.stem}", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    capability = int(arch.rstrip("a"))
    kernel = triton.JITFunction(module.kernel.fn, repr=lambda _: variant)
    signature, constants = _signature(kernel.arg_names, module.TYPES, features, capability)
    aligned = {(kernel.arg_names.index(a),): [["tt.divisibility", 16]] for a in module.ALIGNED}
    compiled = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": int(features["warps"]), "num_stages": int(features["stages"])},
    )
    if compiled.metadata.global_scratch_size or compiled.metadata.num_ctas != 1:
        raise SystemExit(f"{variant}: kernels with global scratch memory or clusters are not launched here")
    out.write_bytes(compiled.asm["cubin"])
    return {**_usage(out), "dynamic": int(compiled.metadata.shared)}


def _signature(
    names: list[str], types: dict[str, Any], features: dict[str, str], capability: int
) -> tuple[dict[str, str], dict[tuple[int], int]]:
    """Triton's types of the parameters, and the values of those that are constants, by place."""
    signature, constants = {}, {}
    for place, name in enumerate(names):
        if name in types:
            chosen = types[name] if isinstance(types[name], str) else types[name][features[name]]
            signature[name] = chosen.format(dtype=DTYPES[features["dtype"]])
        else:
            signature[name] = "constexpr"
            constants[(place,)] = int(capability >= 90) if name == "PDL" else int(features[name.lower()])
    return signature, constants


def _usage(cubin: Path) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    found = _USAGE.search(text.stdout)
    if found is None:
        raise SystemExit(f"cuobjdump says nothing of {cubin}: {text.stdout}")
    registers, stack, shared, local = map(int, found.groups())
    return {"registers": registers, "stack": stack, "shared": shared, "spills": local}


if __name__ == "__main__":
    main(*sys.argv[1:])
