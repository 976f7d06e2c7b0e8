"""Products of 17 to 128 rows where no kernel is written for the architecture: triton/gemm/tiled.py."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.launch import Arg, i32, ptr

TOKENS = (32, 64, 128)  # rows of x that kernels are compiled for
COLUMNS = 64  # of the output in a tile
PER_SM = 2  # blocks that share an SM
MAX_SPLITS, LEAST_DEPTH = 8, 512  # parts of k, and elements of k in one
DTYPES = ("bf16",)


@dataclass(frozen=True)
class TiledChoice:
    """A launch of triton/gemm/tiled.py."""

    kernel: str
    tiles: int
    splits: int  # of k
    why: str

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.tiles, self.splits, 1)

    def __str__(self) -> str:
        return f"{self.kernel}: {self.tiles} tiles x {self.splits} splits ({self.why})"


def tiled_choice(dtype: str, out: str, m: int, n: int, k: int, info: DeviceInfo) -> TiledChoice | None:
    """None for what the kernels do not take: other dtypes, more rows, k of no multiple of 16."""
    tokens = next((t for t in TOKENS if m <= t), None)
    if dtype not in DTYPES or tokens is None or k % 16:
        return None
    tiles = -(-n // COLUMNS)
    room = max(1, info.num_sms * PER_SM // tiles)
    splits = max(1, min(MAX_SPLITS, k // LEAST_DEPTH, room))
    return TiledChoice(f"tiled_{dtype}_{out}_{tokens}", tiles, splits, f"{m} rows on sm_{info.arch}")


def tiled_args(
    out: int, x: int, w: int, partial: int, arrivals: int, m: int, n: int, k: int, splits: int
) -> list[Arg]:
    """As the kernel declares them, and the two addresses of scratch memory that Triton appends."""
    pointers = [ptr(out), ptr(x), ptr(w), ptr(partial), ptr(arrivals)]
    return [*pointers, *map(i32, (m, n, k, splits)), ptr(None), ptr(None)]
