"""Experiment: variants of the delta rule of one-token rows, alone and in steps.

python bench/lab_delta.py table NAME... | test NAME | steps NAME FOLDER ...
"""

from __future__ import annotations

import argparse
import dataclasses
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


def patch(full: str) -> None:
    """NAME, NAME+pN (states N pages of 4 KiB further apart) or NAME+c (a layer's states side by side)."""
    name, _, apart = full.partition("+")
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
        if apart and kernel.startswith(("delta_decode", "delta_hint", "delta_dyn", "delta_sta")):
            values = list(args[0].values)
            s = self.sizes
            each = s["H"] * s["K"] * s["V"]
            assert values[15] == s["Y"] * each, values
            item = 2 if self.dtype("delta") == "bf16" else 4
            values[15] = each if apart == "c" else values[15] + 4096 * int(apart[1:]) // item
            args = [dataclasses.replace(args[0], values=tuple(values))]
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


def same(names: list[str], rows: list[int], dtype: str) -> None:
    """Variants in turn on the same states: where memory lies is a matter of luck."""
    from unittest.mock import patch as mocked

    import cuda_delta

    from pegainfer.lower.cuda.context import CudaContext
    from pegainfer.runtime.cuda.tensor import DeviceTensor

    ctx = CudaContext()
    copying = cuda_delta.copy_bandwidth(ctx)
    args = argparse.Namespace(key_heads=16, heads=32, repeats=20, state_dtype=dtype)
    item = 2 if dtype == "bf16" else 4
    print(f"copies {copying / 1e12:.2f} TB/s; share of it, us; states {dtype}")
    plain_empty = DeviceTensor.empty
    for n in rows:
        each = 32 * 128 * 128 * item
        layers = max(2, (2 << 30) // (each * n))
        pools: dict[int, Any] = {}

        def empty(shape: Any, dtype: str, *rest: Any, pools: Any = pools, **kw: Any) -> Any:
            if len(shape) != 5:
                return plain_empty(shape, dtype, *rest, **kw)
            if not pools:
                pools[0] = plain_empty((shape[0] + 2, *shape[1:]), dtype)
                ctx.stream.fill(pools[0].address, 0, pools[0].nbytes)
            return DeviceTensor.at(pools[0].address, shape, dtype, pools[0])

        found: dict[str, list[float]] = {name: [] for name in names}
        with mocked.object(cuda_delta.DeviceTensor, "empty", empty):
            for order in (names, names[::-1]):
                for name in order:
                    patch(name)
                    found[name].append(cuda_delta.timed(ctx, args, [1] * n, layers))
        for name, us in found.items():
            share = 2 * each * n / min(us) * 1e6 / copying
            print(f"{n:4} {name:12} " + " ".join(f"{u:7.1f}" for u in us) + f" {share:4.0%}", flush=True)


def in_turn(names: list[str], folder: str, batches: list[int], dtype: str) -> None:
    """Steps of one engine with each variant in turn."""
    import cuda_steps

    from pegainfer.app.assemble import build_engine
    from pegainfer.app.config import EngineConfig
    from pegainfer.engine.config import SchedulerConfig
    from pegainfer.lower.cuda.lowered import CapturedSteps
    from pegainfer.runner.ready import ReadySizes

    config = EngineConfig(backend="cuda", load_format="dummy", max_model_len=400, state_dtype=dtype)
    engine = build_engine(Path(folder), "m", config, SchedulerConfig(max_slots=max(batches)))
    runner: Any = engine.runner
    bench = cuda_steps.Bench(runner, 256 + cuda_steps.STEPS + 16)
    found: dict[tuple[str, int], list[float]] = {}
    for order in (names, names[::-1]):
        for name in order:
            patch(name)
            forward = runner._parts.forward
            runner._end_repeats()
            runner._sizes = ReadySizes(runner._parts, runner._sizes.buckets)
            forward._captured = CapturedSteps("forward", forward._symbols)
            forward._steps.clear()
            for batch in batches:
                for slot in range(batch):
                    bench.prefill(slot, 256, 100 + slot)
                found.setdefault((name, batch), []).append(bench.decode(batch, 256)["device_ms"])
                bench.start(frees=tuple(range(batch))).wait()
    for name in names:
        times = ("  ".join([f"{b}:", *(f"{t:.3f}" for t in found[name, b])]) for b in batches)
        print(f"{name:12} " + "   ".join(times), flush=True)
    runner.close()


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
    elif what in ("same", "same16"):
        same(rest, [64, 128], "bf16" if what == "same16" else "f32")
    elif what in ("turns", "turns16"):
        in_turn(rest[2:], rest[0], [int(b) for b in rest[1].split(",")], "bf16" if what[-1] == "6" else "f32")
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
