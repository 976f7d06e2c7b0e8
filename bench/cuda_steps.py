"""A GPU's decode and prefill steps without a scheduler: device time, time a token, host time to submit.

python bench/cuda_steps.py FOLDER [--context 1024] [--batch 1 64 256] [--prefill 1024] [--dummy] [--drawn]
    [--kernels] [--kv-cache-dtype fp8] [--state-dtype bf16] [--quantization fp8] [--adapters N]
    [--tensor-parallel-size N [--alone] [--enable-expert-parallel]]

--drawn: each batch decodes a second time, drawing at temperature 0.8 with top-k 40 and top-p 0.9.
--kernels: prints the device time of each step by kernel; not with several ranks, but with --alone.
--alone: runs only the first of N ranks, which does not wait for others: a step's time without communication.
--adapters: each batch decodes again with one LoRA adapter in all rows, then with N that rows take in turn.
    Their values are random, their rank is --rank, and they change all linear layers but the head.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.app.assemble import build_engine
from pegainfer.app.bounds import model_groups, runner_info
from pegainfer.app.config import KV_DTYPES, STATE_DTYPES, EngineConfig
from pegainfer.app.gpu import build_runner
from pegainfer.app.load import open_model
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, PageGroup, Row, Runner, SlotBlocks, StepPlan
from pegainfer.engine.config import SchedulerConfig
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.measure.cuda.shares import kernel_shares
from pegainfer.runner.adapters import Laid
from pegainfer.runtime.bf16 import to_bf16
from pegainfer.runtime.rank_memory import RankMemory

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20)
DRAWN = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, max_tokens=1 << 20)
STEPS = 100


class Bench:
    """Sequences in slots, each with blocks of its own."""

    def __init__(self, runner: Runner, reach: int) -> None:
        self.runner = runner
        self._steps = itertools.count(1)
        self._reach = reach
        info = runner.info
        most = min(n // self._each(g) for g, n in enumerate(info.num_blocks))
        if most < info.max_slots:
            raise SystemExit(f"the KV cache holds {most} such sequences: lower --batch or --context")

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that a step takes."""
        return self.runner.info.max_tokens - self.runner.info.max_slots

    def last_chunk(self, tokens: int) -> int:
        return (tokens - 1) % self.chunk + 1

    def _each(self, group: int) -> int:
        """Blocks of a sequence in a group of pages; its one state in a group of states."""
        kind = self.runner.info.kv.groups[group]
        return -(-self._reach // kind.block_size) if isinstance(kind, PageGroup) else 1

    def _blocks(self, slot: int, tokens: int) -> tuple[SlotBlocks, ...]:
        """The slot's share of each group's blocks; a prompt beyond a sequence's share is alone."""
        found = []
        for group, kind in enumerate(self.runner.info.kv.groups):
            count = first = self._each(group)
            if isinstance(kind, PageGroup):
                count = max(count, -(-(tokens + 1) // kind.block_size))
            found.append(SlotBlocks(slot, group, tuple(range(first * slot, first * slot + count))))
        return tuple(found)

    def start(self, **parts: Any) -> Any:
        return self.runner.sample(self.runner.forward(StepPlan(step=next(self._steps), **parts)))

    def install_adapters(self, count: int, rank: int) -> None:
        """Made-up factors of all linear layers but the head, and not of the embedding."""
        runner: Any = self.runner
        values = to_bf16(np.random.default_rng(0).standard_normal(1 << 16, np.float32) * np.float32(0.02))
        weights = [w for w in runner._adapters._weights if w.name.startswith("layers.")]
        for index in range(count):
            laid = {
                w.key: Laid(
                    np.resize(values, (rank, w.base.columns)), np.resize(values[index:], (rank, w.base.rows))
                )
                for w in weights
            }
            runner.install_adapter(index, laid)

    def prefill(
        self, slot: int, tokens: int, seed: int, sampling: SamplingParams = GREEDY, adapter: int = -1
    ) -> float:
        """Seconds of the device; the slot is taken then."""
        ids = [(seed * 7919 + i * 104729) % 100_000 for i in range(tokens)]
        new = NewSlot(
            slot=slot, seq=seed, tokens=pack_tokens(ids), num_prompt=tokens, sampling=sampling, seed=seed,
            adapter=adapter,
        )  # fmt: skip
        total, chunk = 0.0, self.chunk
        parts: dict[str, Any] = {"news": (new,), "blocks": self._blocks(slot, tokens)}
        for at in range(0, tokens, chunk):
            count = min(chunk, tokens - at)
            total += self.start(rows=(Row(slot, at, count, at + count == tokens),), **parts).wait().seconds
            parts = {}
        return total

    def decode(self, batch: int, context: int) -> dict[str, float]:
        """Medians over steps, two in flight: ms a token, device ms, host µs to submit."""
        flight: deque[Any] = deque()
        walls, host, device = [], [], []
        last = time.perf_counter()
        for i in range(STEPS):
            rows = tuple(Row(s, context + i, 1, True, True) for s in range(batch))
            began = time.perf_counter()
            flight.append(self.start(rows=rows, repeats=i > 1))  # as the scheduler says it
            host.append(time.perf_counter() - began)
            if len(flight) == 2:
                device.append(flight.popleft().wait().seconds)
                now = time.perf_counter()
                walls.append(now - last)
                last = now
        while flight:
            flight.popleft().wait()
        pick = statistics.median
        return {
            "tpot_ms": 1e3 * pick(walls[5:]), "device_ms": 1e3 * pick(device[5:]),
            "host_us": 1e6 * pick(host[5:]),
        }  # fmt: skip


def show_kernels(
    runner: Any, title: str, tokens: int, rows: int, decode: bool, adapted: bool = False
) -> None:
    """The kernels of a step's forward pass, the slowest first."""
    print(f"kernels of {title}")
    bucket = runner._sizes.buckets.of(tokens, rows, decode)
    forward = runner._parts.forward_of(adapted)
    for share in kernel_shares(forward._ctx, forward.launches(bucket.env, decode)):
        print(f"  {share}")


def build_alone(folder: Path, config: EngineConfig, scheduler: SchedulerConfig) -> tuple[Any, str]:
    """The runner of the first rank, which is not connected to others, and its device."""
    ranks = config.tensor_parallel_size
    with open_model(folder, config.load_format, config.place_of(0), config.quantization) as (model, _):
        groups, info = model_groups(model, config), runner_info(model, config, scheduler)
        CudaContext.connect = lambda self: None  # type: ignore[method-assign]
        built = build_runner(
            model, folder, groups, info, config, scheduler, config.place_of(0), RankMemory.create(ranks)
        )  # fmt: skip
    return built.runner, f"one of {ranks} ranks, alone, on {built.device}"


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    p.add_argument("--prefill", type=int, nargs="+", default=[1024])
    p.add_argument("--dummy", action="store_true")
    p.add_argument("--chunk", type=int, help="prompt tokens of a step, instead of the default")
    p.add_argument("--quantization")
    p.add_argument("--drawn", action="store_true")
    p.add_argument("--kernels", action="store_true")
    p.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPES)
    p.add_argument("--state-dtype", default="f32", choices=STATE_DTYPES)
    p.add_argument("--no-graph", action="store_true")
    p.add_argument("--tensor-parallel-size", type=int, default=1)
    p.add_argument("--enable-expert-parallel", action="store_true")
    p.add_argument("--alone", action="store_true")
    p.add_argument("--share-gpu", action="store_true")
    p.add_argument("--adapters", type=int, default=0)
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--output", type=Path, default=Path("bench/results/cuda-steps.jsonl"))
    a = p.parse_args()
    length = max(a.context, *a.prefill) + STEPS + 16
    config = EngineConfig(
        backend="cuda",
        load_format="dummy" if a.dummy else "auto",
        quantization=a.quantization,
        max_model_len=length,
        kv_dtype=a.kv_cache_dtype,
        state_dtype=a.state_dtype,
        cuda_graph=not a.no_graph,
        tensor_parallel_size=a.tensor_parallel_size,
        share_gpu=a.share_gpu,
        enable_expert_parallel=a.enable_expert_parallel,
        enable_lora=a.adapters > 0,
        max_loras=max(1, a.adapters),
        max_lora_rank=a.rank,
    )
    scheduler = SchedulerConfig(max_slots=max(a.batch), max_prefill_tokens=a.chunk)
    began = time.perf_counter()
    phases: dict[str, float] = {}
    if a.alone:
        runner, device = build_alone(a.folder, config, scheduler)
    else:
        engine = build_engine(a.folder, a.folder.name, config, scheduler)
        runner, device = engine.runner, engine.info.device
        phases = {k: round(v, 3) for k, v in engine.info.startup_seconds.items()}
    weights = a.quantization or "as in the file"
    print(f"{a.folder.name} on {device}; {runner.info.num_blocks} blocks; weights {weights}")
    print(f"built in {time.perf_counter() - began:.2f} s: {phases}")
    bench = Bench(runner, a.context + STEPS + 16)
    commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True).stdout.strip()
    rows = []
    for tokens in a.prefill:
        times = []
        for seed in range(6):
            times.append(1e3 * bench.prefill(0, tokens, seed + 1))
            bench.start(frees=(0,)).wait()
        rows.append({"case": "prefill", "tokens": tokens, "device_ms": statistics.median(times[1:])})
        if a.kernels:
            show_kernels(runner, f"prefill {tokens}, last chunk", bench.last_chunk(tokens), 1, False)
    kinds = {"greedy": GREEDY, "top_k 40, top_p 0.9": DRAWN} if a.drawn else {"greedy": GREEDY}
    if a.adapters:
        bench.install_adapters(a.adapters, a.rank)
    mixes = [0, *sorted({1, a.adapters} - {0})] if a.adapters else [0]
    for batch, (name, sampling), mix in itertools.product(a.batch, kinds.items(), mixes):
        if mix > batch:
            continue
        for slot in range(batch):
            bench.prefill(slot, a.context, 100 + slot, sampling, slot % mix if mix else -1)
        row = {"case": "decode", "batch": batch, "context": a.context, "sampling": name, "adapters": mix}
        rows.append(row | bench.decode(batch, a.context))
        if a.kernels:
            show_kernels(runner, f"decode {batch}, {mix} adapters", batch, batch, True, mix > 0)
        bench.start(frees=tuple(range(batch))).wait()
    runner.close()
    a.output.parent.mkdir(parents=True, exist_ok=True)
    with a.output.open("a") as f:
        for row in rows:
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
            head = {
                "commit": commit,
                "device": device,
                "model": a.folder.name,
                "weights": weights,
                "startup": phases,
                "kv": config.kv_format,
            }
            f.write(json.dumps({**head, **row}) + "\n")


if __name__ == "__main__":
    main()
