"""Experiment: variants of the delta rule of one-token rows, alone and in steps.

python bench/lab_delta.py table NAME... | test NAME | steps NAME FOLDER ...
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from pegainfer.lower.cuda.lowering import LoweringContext

sys.path.insert(0, str(Path(__file__).parent))
SETTINGS = {
    "ring3": (1, 544, 196608),
    "ring2": (1, 544, 131072),
    "ring6": (1, 544, 196608),
    "ring4": (1, 544, 131072),
    "hint": (2, 256, 65536),
}
plain = LoweringContext.launch


def patch(name: str) -> None:
    def launch(self: Any, kernel: str, grid: Any, threads: int, args: Any, shared: int = 0, **kw: Any) -> Any:
        if name != "base" and kernel.startswith("delta_decode_bf16"):
            s = self.sizes
            group = 2 * s["H"] * s["V"] // max(1, s["F"] - s["H"] * s["V"])
            keys = s["H"] // group
            if 4 * keys * s["R"] >= 3 * 2 * self.target.info.num_sms or name.startswith("hint"):
                _, threads, shared = next(v for k, v in SETTINGS.items() if name.startswith(k))
                units = keys * s["R"]
                sms = self.target.info.num_sms
                grid = (min(-(-units // 2), sms), 1, 1) if "ring" in name else grid
                kernel = f"delta_{name}_bf16"
        return plain(self, kernel, grid, threads, args, shared, **kw)

    LoweringContext.launch = launch  # type: ignore[method-assign]


def table(names: list[str], rows: list[int], dtype: str = "f32") -> None:
    import cuda_delta

    from pegainfer.lower.cuda.context import CudaContext

    ctx = CudaContext()
    copying = cuda_delta.copy_bandwidth(ctx)
    args = argparse.Namespace(key_heads=16, heads=32, repeats=20, state_dtype=dtype)
    print(f"copies {copying / 1e12:.2f} TB/s; share of it, us")
    for name in names:
        patch(name)
        found = []
        for n in rows:
            each = 32 * 128 * 128 * (2 if dtype == "bf16" else 4)
            layers = max(2, (2 << 30) // (each * n))
            us = cuda_delta.timed(ctx, args, [1] * n, layers)
            found.append(f"{n}: {us:7.1f} {2 * each * n / us * 1e6 / copying:4.0%}")
        print(f"{name:10} " + "  ".join(found), flush=True)


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "table":
        table(rest, [16, 32, 64, 128, 256])
    elif what == "table16":
        table(rest, [16, 32, 64, 128, 256], "bf16")
    elif what == "test":
        import pytest

        patch(rest[0])
        sys.exit(pytest.main(["-q", "-x", *rest[1:]]))
    else:
        patch(rest[0])
        sys.argv = ["cuda_steps", *rest[1:]]
        runpy.run_path(str(Path(__file__).parent / "cuda_steps.py"), run_name="__main__")


if __name__ == "__main__":
    main()
