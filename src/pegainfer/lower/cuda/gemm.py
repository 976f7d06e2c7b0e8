"""GEMMs: problem, choice and launch. Few rows stream the weight; more of them go to cuBLASLt. A packed weight
has kernels of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from pegainfer.lower.cuda.fp8 import Fp8Choice, choose_fp8, codes_and_scales, fp8_gemm
from pegainfer.lower.cuda.lowering import LoweringContext, blocks
from pegainfer.lower.cuda.packed import ExpandChoice, PackedChoice, choose_packed, expand, packed_gemm
from pegainfer.lower.cuda.plan import ARRIVALS, Place, ptr, struct
from pegainfer.lower.cuda.skinny import NextNorm, Scale, SkinnyChoice, choose_skinny, skinny
from pegainfer.lower.cuda.target import SYSTEM, Target
from pegainfer.lower.cuda.wide import choose_wide
from pegainfer.runtime.cuda.arguments import STREAM
from pegainfer.runtime.cuda.cublaslt import MatmulProblem
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.launch import f32, i32, i64
from pegainfer.runtime.cuda.packed import FORMS
from pegainfer.runtime.cuda.tensor import item_bytes

STREAM_TOKENS = 16  # above, a wgmma kernel or cuBLAS reads x less often
THREADS, WARPS, TILE, CHUNK = 256, 8, 16, 64  # as in common/gemm/stream.cuh
STAGE = TILE * CHUNK * 2  # bytes
X_PAD = 64
LEAST_DEPTH, MAX_SPLITS = 4, 8  # shallower rings lose more than a split of k costs
STATIC = 1 << 10  # bytes of static shared memory, rounded up
SIXTEEN = ("bf16", "f16")


@dataclass(frozen=True)
class GemmProblem:
    """out[m, n] = x[m, k] · w[n, k]ᵀ.

    Args:
        out: 'store', 'storef32', 'residual' (out += …) or 'swiglu' (w's rows are gate and up in pairs, out
            is [m, n / 2]).
        norm: x is normalised first.
        weights: as fp8.stays_fp8 says it; '': the weight has x's dtype.
        form: of a packed weight, a key of runtime.cuda.packed.FORMS; '': w is of `dtype`.
        alike: all ranks must get the same bits.
    """

    m: int
    n: int
    k: int
    dtype: str
    out: str = "store"
    norm: bool = False
    weights: str = ""
    form: str = ""
    alike: bool = False

    def __str__(self) -> str:
        norm = "rms_norm(x)" if self.norm else "x"
        dtypes = self.form or " ".join(filter(None, (self.dtype, self.weights)))
        return f"{self.out} {norm}[{self.m}, {self.k}] · w[{self.n}, {self.k}]ᵀ {dtypes}"


@dataclass(frozen=True)
class StreamChoice:
    """A launch of common/gemm/stream.cuh."""

    kernel: str
    groups: int  # of rows of w
    splits: int  # of k
    depth: int  # stages of each warp's ring
    shared: int  # bytes
    norm: bool  # whether it normalises x; else a launch before it does, where the problem asks for it
    why: str = ""

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.groups * self.splits, 1, 1)

    @property
    def reason(self) -> str:
        return (
            f"{self.groups} groups x {self.splits} splits, {self.depth} stages, {self.shared} B ({self.why})"
        )

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


@dataclass(frozen=True)
class LibraryChoice:
    """cuBLASLt, with norm and activation as launches of their own."""

    why: str

    def __str__(self) -> str:
        return f"cublasLt ({self.why})"


GemmChoice = SkinnyChoice | Fp8Choice | StreamChoice | LibraryChoice | PackedChoice | ExpandChoice


@lru_cache(maxsize=4096)
def choose_gemm(p: GemmProblem, target: Target) -> GemmChoice:
    """Which kernel runs a problem, and why; the same answer for the same problem and target."""
    if p.form:
        return choose_packed(p.m, p.n, p.k, FORMS[p.form], target)
    if p.dtype not in SIXTEEN:
        return LibraryChoice(f"{p.dtype}: the streaming kernels take {' and '.join(SIXTEEN)}")
    hopper = choose_skinny(p.dtype, p.m, p.n, p.k, p.out, target, p.weights)
    if hopper is not None:
        return hopper
    if p.weights:
        return choose_fp8(p.weights, p.m, p.n, p.k, target)
    wide = choose_wide(p.dtype, p.m, p.n, p.k, p.out, target)
    if isinstance(wide, str):
        return LibraryChoice(f"{p.m} rows: {wide}")
    return wide or choose_stream(p, target.info)


def choose_stream(p: GemmProblem, info: DeviceInfo) -> StreamChoice | LibraryChoice:
    """The choice where no kernel is made for the device alone."""
    if p.m > STREAM_TOKENS:
        return LibraryChoice(f"{p.m} rows: the streaming kernels take {STREAM_TOKENS}")
    if p.k % 8:
        return LibraryChoice(f"k = {p.k}: the streaming kernels take multiples of 8")
    for norm in (True, False) if p.norm else (False,):
        for splits in (1,) if norm else (1, 2, 4, MAX_SPLITS):
            for per_sm, deepest in ((2, 5), (1, 7)):
                for depth in range(deepest, LEAST_DEPTH - 1, -1):
                    choice = stream_choice(p, info, per_sm, splits, depth, norm)
                    if choice is not None:
                        return choice
    return LibraryChoice(f"shared memory: no {LEAST_DEPTH} stages fit beside {p.m} rows of {p.k}")


def stream_choice(
    p: GemmProblem, info: DeviceInfo, per_sm: int, splits: int, depth: int, norm: bool
) -> StreamChoice | None:
    """That launch, or None where it does not fit the device. `per_sm` blocks share an SM."""
    chunks = blocks(p.k, CHUNK)
    tiles = 1 if p.m <= 8 else 2
    x = p.m * (blocks(chunks, splits) * CHUNK * 2 + X_PAD)
    shared = x + WARPS * (depth * STAGE + 2 * tiles * 128 * 4)
    room = min(info.shared_per_sm // per_sm - SYSTEM, info.max_shared) - STATIC
    if shared > room or splits > chunks:
        return None
    groups = max(1, min(info.num_sms * per_sm // splits, blocks(p.n, 8)))
    kernel = f"stream_{p.dtype}_{'norm_' if norm else ''}{p.out}_{8 * tiles}"
    return StreamChoice(kernel, groups, splits, depth, shared, norm, f"{p.m} rows; {per_sm} blocks an SM")


def project(
    c: LoweringContext,
    p: GemmProblem,
    out: Place,
    x: Place,
    w: Place,
    *,
    ld_out: int | None = None,
    norm: Place | None = None,
    rows: Place | None = None,
    eps: float = 0.0,
    scale: Scale | None = None,
    next_norm: NextNorm | None = None,
) -> None:
    """Lowers one GEMM.

    Args:
        ld_out: elements between rows of out; its width if None. cuBLASLt's route takes none.
        norm: the norm's float32 weight, for p.norm.
        rows: the rows of x to take; all in order if None.
        scale: x is already times its norm's weight, and the sums are scaled by what this says.
        next_norm: what to leave for the norm that follows, for 'residual'.

    `scale` and `next_norm` need a SkinnyChoice or a PackedChoice.
    """
    if p.m == 0:
        return
    choice = choose_gemm(p, c.target)
    if isinstance(choice, StreamChoice):
        stream(c, p, choice, out, x, w, ld_out, norm, rows, eps)
        return
    if rows is not None:
        x = take_rows(c, x, rows, p.m, p.k, p.dtype)
    if isinstance(choice, Fp8Choice):
        fp8_gemm(c, choice, p.out, (p.m, p.n, p.k), out, x, w, ld_out=ld_out, norm=norm, eps=eps)
        return
    if norm is not None:
        x = rms_norm(c, c.scratch(p.m * p.k * item_bytes(p.dtype)), x, norm, p.m, p.k, p.dtype, eps)
    sizes = (p.m, p.n, p.k)
    if isinstance(choice, PackedChoice):
        packed_gemm(c, choice, p.out, sizes, out, x, w, ld_out=ld_out, scale=scale, eps=eps,
                    next_norm=next_norm)  # fmt: skip
        return
    if isinstance(choice, ExpandChoice):
        plain = replace(p, norm=False, form="")
        project(c, plain, out, x, expand(c, w, p.n, p.k, choice.why), ld_out=ld_out)
        return
    if isinstance(choice, SkinnyChoice):
        w, scales = codes_and_scales(w) if p.weights else (w, None)
        skinny(
            c, choice, p.out, p.dtype, sizes, out, x, w, ld_out=ld_out, scale=scale, eps=eps,
            next_norm=next_norm, scales=scales,
        )  # fmt: skip
        return
    out_dtype = "f32" if p.out == "storef32" else p.dtype
    target = c.scratch(p.m * p.n * item_bytes(p.dtype)) if p.out == "swiglu" else out
    problem = MatmulProblem(p.m, p.n, p.k, p.dtype, out_dtype, p.out == "residual", p.alike)
    c.matmul(problem, x, w, target, choice.why)
    if p.out == "swiglu":
        silu(c, "silu_mul_pairs", [out, target], p.m * p.n // 2, p.dtype)


def stream(
    c: LoweringContext,
    p: GemmProblem,
    choice: StreamChoice,
    out: Place,
    x: Place,
    w: Place,
    ld_out: int | None = None,
    norm: Place | None = None,
    rows: Place | None = None,
    eps: float = 0.0,
) -> None:
    """Lowers one GEMM to its choice; arguments as in `project`."""
    if norm is not None and not choice.norm:
        if rows is not None:
            x, rows = take_rows(c, x, rows, p.m, p.k, p.dtype), None
        x = rms_norm(c, c.scratch(p.m * p.k * item_bytes(p.dtype)), x, norm, p.m, p.k, p.dtype, eps)
    partial = c.scratch(4 * choice.splits * p.m * p.n) if choice.splits > 1 else None
    width = p.n // 2 if p.out == "swiglu" else p.n
    args = struct(
        STREAM, out=out, x=x, w=w, norm=norm, rows=rows, partial=partial, arrivals=Place(ARRIVALS), m=p.m,
        n=p.n, k=p.k, ld_out=ld_out or width, splits=choice.splits, depth=choice.depth, eps=eps,
    )  # fmt: skip
    c.launch(choice.kernel, choice.grid, THREADS, [args], choice.shared, why=choice.reason)


def vector_width(count: int, dtype: str) -> tuple[int, str]:
    """(elements an access, kernel suffix) for rows of `count`: whole 16 bytes where they allow it."""
    each = 16 // item_bytes(dtype)
    return (each, "") if count % each == 0 else (1, "_any")


def row_threads(width: int, each: int) -> int:
    return min(1024, max(32, blocks(blocks(width, each), 32) * 32))


def take_rows(
    c: LoweringContext,
    x: Place,
    rows: Place,
    m: int,
    width: int,
    dtype: str,
    out: Place | None = None,
    limit: int | None = None,
) -> Place:
    """Copies rows of x [limit, width]; returns the copy [m, width]."""
    each, suffix = vector_width(width, dtype)
    to = c.scratch(m * width * item_bytes(dtype)) if out is None else out
    args = [ptr(to), ptr(x), ptr(rows), i32(width), i32(2**31 - 1 if limit is None else limit)]
    kernel = f"take_rows_{8 * item_bytes(dtype)}{suffix}"
    c.launch(kernel, (m, 1, 1), row_threads(width, each), args)
    return to


def rms_norm(
    c: LoweringContext, out: Place, x: Place, weight: Place, rows: int, width: int, dtype: str, eps: float
) -> Place:
    each, suffix = vector_width(width, dtype)
    args = [ptr(out), ptr(x), ptr(weight), i32(width), f32(eps)]
    c.launch(f"rms_norm_{dtype}{suffix}", (rows, 1, 1), row_threads(width, each), args, why="a norm apart")
    return out


def silu(c: LoweringContext, kernel: str, operands: list[Place], count: int, dtype: str) -> None:
    each, suffix = vector_width(count, dtype)
    grid = min(blocks(count, 256 * each), 8 * c.target.info.num_sms)
    c.launch(f"{kernel}_{dtype}{suffix}", (grid, 1, 1), 256, [*map(ptr, operands), i64(count)])
