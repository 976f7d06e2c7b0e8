"""Experiment: variants of the delta rule of one-token rows, alone and in steps.

python bench/lab_delta.py table NAME... | test NAME | steps NAME FOLDER ...
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import pegainfer.lower.cuda.delta as lower
from pegainfer.lower.cuda.lowering import LoweringContext

sys.path.insert(0, str(Path(__file__).parent))
SETTINGS = {
    "hintb": (256, 32768), "hint": (256, 65536), "dyn3t3": (800, 196608), "dyn3": (544, 196608),
    "sta3": (544, 196608), "dyn2": (544, 131072), "dyn6t3": (800, 196608), "dyn6": (544, 196608),
}  # fmt: skip
PER_SM = lower.DECODE_PER_SM
plain = LoweringContext.launch


def patch(name: str) -> None:
    single = name.startswith(("dyn", "sta"))
    lower.DECODE_PER_SM = 1 << 20 if single else PER_SM  # a head a turn

    def launch(self: Any, kernel: str, grid: Any, threads: int, args: Any, shared: int = 0, **kw: Any) -> Any:
        if not name.startswith(("base", "pre")) and kernel.startswith("delta_decode_bf16"):
            s, sms = self.sizes, self.target.info.num_sms
            keys = (s["F"] - s["H"] * s["V"]) // (2 * s["K"])
            if single or name.startswith("hint") or 4 * keys * s["R"] >= 3 * 2 * sms:
                threads, shared = next(v for k, v in SETTINGS.items() if name.startswith(k))
                if single:
                    grid = (min(s["H"] * s["R"], sms), 1, 1)
                elif "ring" in name:
                    grid = (min(-(-keys * s["R"] // 2), sms), 1, 1)
                kernel = f"delta_{name}_bf16"
        if name.startswith("pre") and kernel == "delta_chunk_prepare_bf16":
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


def prefill(names: list[str]) -> None:
    import cuda_delta

    from pegainfer.lower.cuda.context import CudaContext

    ctx = CudaContext()
    args = argparse.Namespace(key_heads=16, heads=32, repeats=20, state_dtype="f32")
    for name in names:
        patch(name)
        found = []
        for rows, tokens in ((1, 64), (1, 1024), (1, 16000), (8, 1024)):
            us = cuda_delta.timed(ctx, args, [tokens] * rows, 1)
            rate = cuda_delta.FLOPS * 32 * rows * tokens / us / 1e6
            found.append(f"{rows}x{tokens}: {us:7.1f} {rate:4.0f}")
        print(f"{name:10} " + "  ".join(found), flush=True)


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "table":
        table(rest, [16, 32, 64, 128])
    elif what == "table16":
        table(rest, [8, 16, 32, 64, 128], "bf16")
    elif what == "prefill":
        prefill(rest)
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
