"""KV transfers between a GPU and its host tier: bandwidth beside the link's, and what decoding loses.

python bench/cuda_tiers.py FOLDER [--dummy] [--gib 9] [--batch 32] [--context 1024]

Saves and loads --gib GiB each, first alone, then beside decode steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cuda_steps import STEPS, Bench

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.cli.links import device_bandwidth
from pegainfer.contract.step import Row
from pegainfer.contract.tiers import DEVICE, Transfer
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kv.layout import group_bytes

HOST = 1  # the pool's number
A_PLAN = 128  # transfers that one plan begins in each direction
PATIENCE = 60.0  # seconds after which unfinished transfers are an error
MOST_STEPS = 1000  # of decoding beside transfers


class Traffic(Bench):
    """Steps that carry transfers of blocks which no sequence uses."""

    def __init__(self, runner: Any, reach: int, blocks: int, batch: int) -> None:
        """`blocks`: most that are moved in each direction."""
        super().__init__(runner, reach)
        self.blocks = min(blocks, (runner.info.num_blocks[0] - batch * self._each(0)) // 2)
        if self.blocks < 1:
            raise SystemExit("the KV cache has no room for blocks to move: lower --batch or --context")
        self._ids = itertools.count(1)
        (last,) = runner.info.num_blocks
        self._saved, self._loaded = last - 2 * self.blocks, last - self.blocks  # first blocks of two ranges

    def saves(self, first: int) -> Iterator[Transfer]:
        """To the host's blocks from `first` on."""
        for i in range(self.blocks):
            at = first + i
            yield Transfer(next(self._ids), 0, DEVICE, self._saved + i, HOST, at, key=self._key(at))

    def loads(self) -> Iterator[Transfer]:
        """From the host's blocks 0, 1, …"""
        for i in range(self.blocks):
            yield Transfer(next(self._ids), 0, HOST, i, DEVICE, self._loaded + i, key=self._key(i))

    @staticmethod
    def _key(i: int) -> bytes:
        return i.to_bytes(32, "little")

    def move(self, *ways: Iterable[Transfer]) -> float:
        """Seconds until all of these transfers have ended, which one plan begins, without any other work."""
        moved = tuple(itertools.chain(*ways))
        began = time.perf_counter()
        left = len(moved) - self._ended(self.start(transfers=moved).wait())
        while left:
            left -= self._ended(self.start(wait_transfers=True).wait())
            if time.perf_counter() - began > PATIENCE:
                raise SystemExit(f"{left} transfers have not ended")
        return time.perf_counter() - began

    @staticmethod
    def _ended(result: Any) -> int:
        if result.failed:
            raise SystemExit(f"a transfer failed: {next(iter(result.failed.values()))}")
        return len(result.landed)

    def decode_beside(self, batch: int, context: int, ways: list[Iterator[Transfer]]) -> tuple[float, float]:
        """Median ms a step and seconds that the transfers took. Takes STEPS steps where there are none."""
        for slot in range(batch):
            self.prefill(slot, context, 100 + slot)
        flight: deque[Any] = deque()
        walls = []
        left, more = 0, bool(ways)
        began = last = time.perf_counter()
        for i in range(MOST_STEPS if ways else STEPS):
            count = A_PLAN if left < 8 * A_PLAN else 0
            moved = tuple(t for way in ways for t in itertools.islice(way, count))
            more = more and (bool(moved) or not count)
            left += len(moved)
            rows = tuple(Row(s, context + i, 1, True, True) for s in range(batch))
            flight.append(self.start(rows=rows, repeats=i > 1, transfers=moved))
            if len(flight) == 2:
                left -= self._ended(flight.popleft().wait())
                now = time.perf_counter()
                walls.append(now - last)
                last = now
            if ways and not more and not left:
                break
        while flight:
            left -= self._ended(flight.popleft().wait())
        if more or left:
            raise SystemExit(f"{left} transfers have not ended after {MOST_STEPS} steps")
        self.start(frees=tuple(range(batch))).wait()
        return 1e3 * statistics.median(walls[5:]), last - began


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("--dummy", action="store_true")
    p.add_argument("--gib", type=int, default=9)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--context", type=int, default=1024)
    a = p.parse_args()
    length = a.context + MOST_STEPS + 16
    config = EngineConfig(
        backend="cuda",
        load_format="dummy" if a.dummy else "auto",
        max_model_len=length,
        kv_offload=2 * a.gib << 30,
    )
    engine = build_engine(a.folder, a.folder.name, config, SchedulerConfig(max_slots=a.batch))
    info = engine.runner.info
    (tier,) = info.tiers
    bench = Traffic(engine.runner, length, tier.num_blocks[0] // 2, a.batch)
    blocks = bench.blocks
    moved = blocks * group_bytes(info.kv)[0] / 1e9
    up, down = device_bandwidth(0)
    print(f"{engine.info.model} on {engine.info.device}, {blocks} blocks of {moved:.1f} GB in all")
    bench.move(bench.saves(0), bench.saves(blocks))  # page-locked memory is allocated meanwhile
    rates = {
        "saved": (moved / bench.move(bench.saves(blocks)), down),
        "loaded": (moved / bench.move(bench.loads()), up),
        "both": (2 * moved / bench.move(bench.saves(blocks), bench.loads()), up + down),
    }
    for name, (rate, link) in rates.items():
        print(f"{name:8} {rate:6.1f} GB/s, {rate / link:4.0%} of what one large copy takes ({link:.1f} GB/s)")
    for turn in range(2):
        alone, _ = bench.decode_beside(a.batch, a.context, [])
        ms, seconds = bench.decode_beside(a.batch, a.context, [bench.saves(blocks), bench.loads()])
        print(
            f"{turn}: {a.batch} rows {alone:.2f} ms a step, {ms:.2f} ({ms / alone - 1:+.1%}) beside "
            f"{2 * moved:.1f} GB in {seconds:.2f} s ({2 * moved / seconds:.1f} GB/s)"
        )
    engine.runner.close()


if __name__ == "__main__":
    main()
