"""Products of 17 to 128 rows where no kernel is written for the architecture: triton/gemm/tiled.py."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.kernels.load import KernelLibrary
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.launch import Launch, i32, ptr

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


def tiled_choice(
    dtype: str, out: str, m: int, n: int, k: int, info: DeviceInfo, splits: int | None = None
) -> TiledChoice | None:
    """None for what the kernels do not take: other dtypes, more rows, k of no multiple of 16.

    Args:
        out: as in GemmProblem.
        splits: parts of k; None for as many as fill the device.
    """
    tokens = next((t for t in TOKENS if m <= t), None)
    if dtype not in DTYPES or tokens is None or k % 16:
        return None
    tiles = -(-n // COLUMNS)
    if splits is None:
        room = max(1, info.num_sms * PER_SM // tiles)
        splits = max(1, min(MAX_SPLITS, k // LEAST_DEPTH, room))
    return TiledChoice(f"tiled_{dtype}_{out}_{tokens}", tiles, splits, f"{m} rows on sm_{info.arch}")


def launch_tiled(
    library: KernelLibrary,
    c: TiledChoice,
    out: int,
    x: int,
    w: int,
    partial: int,
    arrivals: int,
    sizes: tuple[int, int, int],
    *,
    pdl: bool,
    label: str = "",
) -> Launch:
    """Arguments as the kernel declares them, and the two addresses of scratch memory that Triton appends.

    Args:
        out, x, w: addresses; partial: of splits · m · n float32, for several splits.
        arrivals: of a counter a tile, zero before and after.
        sizes: m, n, k.
    """
    variant = library.variant(c.kernel)
    kernel = library.kernel(c.kernel)  # raises where it was not built
    assert variant is not None
    args = [*map(ptr, (out, x, w, partial, arrivals)), *map(i32, (*sizes, c.splits)), ptr(None), ptr(None)]
    threads, shared = 32 * int(variant.features["warps"]), int(variant.features["shared"])
    return Launch(kernel, c.grid, threads, args, shared=shared, pdl=pdl, label=label)
