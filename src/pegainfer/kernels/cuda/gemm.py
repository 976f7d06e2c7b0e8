"""Matrix products: problem, choice and launch. Few rows stream the weight; more of them go to cuBLASLt."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.kernels.cuda.site import NormedRows, Site, blocks, handles
from pegainfer.kernels.cuda.skinny import SkinnyChoice, choose_skinny, skinny
from pegainfer.kernels.cuda.wide import choose_wide
from pegainfer.ops.program import OpCall
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.cublaslt import MatmulProblem
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.launch import f32, i32, i64, ptr, struct
from pegainfer.runtime.cuda.tensor import item_bytes

STREAM_TOKENS = 16  # above, a wgmma kernel or cuBLAS reads x less often
THREADS, WARPS, TILE, CHUNK = 256, 8, 16, 64  # as in common/gemm/stream.cuh
STAGE = TILE * CHUNK * 2  # bytes
X_PAD = 64
LEAST_DEPTH, MAX_SPLITS = 4, 8  # shallower rings lose more than a split of k costs
STATIC = 1 << 10  # bytes of static shared memory, rounded up
SYSTEM = 1 << 10  # bytes a block that the system takes
SIXTEEN = ("bf16", "f16")


@dataclass(frozen=True)
class GemmProblem:
    """out[m, n] = x[m, k] · w[n, k]ᵀ.

    Args:
        out: 'store', 'storef32', 'residual' (out += …) or 'swiglu' (w's rows are gate and up in pairs, out
            is [m, n / 2]).
        norm: x is normalised first.
    """

    m: int
    n: int
    k: int
    dtype: str
    out: str = "store"
    norm: bool = False

    def __str__(self) -> str:
        norm = "rms_norm(x)" if self.norm else "x"
        return f"{self.out} {norm}[{self.m}, {self.k}] · w[{self.n}, {self.k}]ᵀ {self.dtype}"


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

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.groups} groups x {self.splits} splits, {self.depth} stages, "
            f"{self.shared} B ({self.why})"
        )


@dataclass(frozen=True)
class LibraryChoice:
    """cuBLASLt, with norm and activation as launches of their own."""

    why: str

    def __str__(self) -> str:
        return f"cublasLt ({self.why})"


def choose_gemm(p: GemmProblem, info: DeviceInfo) -> SkinnyChoice | StreamChoice | LibraryChoice:
    """Which kernel runs a problem, and why; the same answer for the same problem and device."""
    if p.dtype not in SIXTEEN:
        return LibraryChoice(f"{p.dtype}: the streaming kernels take {' and '.join(SIXTEEN)}")
    hopper = choose_skinny(p.dtype, p.m, p.n, p.k, p.out, info)
    hopper = hopper or choose_wide(p.dtype, p.m, p.n, p.k, p.out, info)
    return hopper or choose_stream(p, info)


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
    site: Site,
    p: GemmProblem,
    out: int,
    x: int,
    w: int,
    *,
    ld_out: int | None = None,
    norm: int | None = None,
    rows: int | None = None,
    eps: float = 0.0,
    next_norm: int | None = None,
) -> None:
    """Lowers one product.

    Args:
        out, x, w: addresses.
        ld_out: elements between rows of out; its width if None. cuBLASLt's route takes none.
        norm: address of the norm's float32 weight, for p.norm.
        rows: address of the rows of x to take; all in order if None.
        next_norm: address of the weight with which the next op normalises `out`, for 'residual'.
    """
    if p.m == 0:
        return
    choice = choose_gemm(p, site.ctx.device.info)
    if isinstance(choice, StreamChoice):
        stream(site, p, choice, out, x, w, ld_out, norm, rows, eps)
        return
    scaled: NormedRows | None = None
    if rows is not None:
        x = take_rows(site, x, rows, p.m, p.k, p.dtype)
    elif isinstance(choice, SkinnyChoice) and (scaled := site.handed_rows(x, norm)):
        x, norm = scaled.address, None
    if norm is not None:
        x = rms_norm(site, site.scratch(p.m * p.k * item_bytes(p.dtype)), x, norm, p.m, p.k, p.dtype, eps)
    if isinstance(choice, SkinnyChoice):
        sizes = (p.m, p.n, p.k)
        skinny(
            site, choice, p.out, p.dtype, sizes, out, x, w, ld_out=ld_out, scaled=scaled, eps=eps,
            next_norm=next_norm,
        )  # fmt: skip
        return
    out_dtype = "f32" if p.out == "storef32" else p.dtype
    target = site.scratch(p.m * p.n * item_bytes(p.dtype)) if p.out == "swiglu" else out
    site.matmul(MatmulProblem(p.m, p.n, p.k, p.dtype, out_dtype, p.out == "residual"), x, w, target)
    if p.out == "swiglu":
        silu(site, "silu_mul_pairs", [out, target], p.m * p.n // 2, p.dtype)


def stream(
    site: Site,
    p: GemmProblem,
    c: StreamChoice,
    out: int,
    x: int,
    w: int,
    ld_out: int | None = None,
    norm: int | None = None,
    rows: int | None = None,
    eps: float = 0.0,
) -> None:
    """Lowers one product to its choice; arguments as in `project`."""
    if norm is not None and not c.norm:
        if rows is not None:
            x, rows = take_rows(site, x, rows, p.m, p.k, p.dtype), None
        x = rms_norm(site, site.scratch(p.m * p.k * item_bytes(p.dtype)), x, norm, p.m, p.k, p.dtype, eps)
    partial = site.scratch(4 * c.splits * p.m * p.n) if c.splits > 1 else 0
    width = p.n // 2 if p.out == "swiglu" else p.n
    args = struct(
        ptr(out), ptr(x), ptr(w), ptr(norm), ptr(rows), ptr(partial), ptr(site.ctx.arrivals.address),
        i32(p.m), i32(p.n), i32(p.k), i32(ld_out or width), i32(c.splits), i32(c.depth), f32(eps),
    )  # fmt: skip
    site.launch(c.kernel, c.grid, THREADS, [args], c.shared)


def vector_width(count: int, dtype: str) -> tuple[int, str]:
    """(elements an access, kernel suffix) for rows of `count`: whole 16 bytes where they allow it."""
    each = 16 // item_bytes(dtype)
    return (each, "") if count % each == 0 else (1, "_any")


def row_threads(width: int, each: int) -> int:
    return min(1024, max(32, blocks(blocks(width, each), 32) * 32))


def take_rows(
    site: Site,
    x: int,
    rows: int,
    m: int,
    width: int,
    dtype: str,
    out: int | None = None,
    limit: int | None = None,
) -> int:
    """Copies rows of x [limit, width]; returns the address of the copy [m, width]."""
    each, suffix = vector_width(width, dtype)
    to = site.scratch(m * width * item_bytes(dtype)) if out is None else out
    args = [ptr(to), ptr(x), ptr(rows), i32(width), i32(2**31 - 1 if limit is None else limit)]
    kernel = f"take_rows_{8 * item_bytes(dtype)}{suffix}"
    site.launch(kernel, (m, 1, 1), row_threads(width, each), args)
    return to


def rms_norm(site: Site, out: int, x: int, weight: int, rows: int, width: int, dtype: str, eps: float) -> int:
    each, suffix = vector_width(width, dtype)
    args = [ptr(out), ptr(x), ptr(weight), i32(width), f32(eps)]
    site.launch(f"rms_norm_{dtype}{suffix}", (rows, 1, 1), row_threads(width, each), args)
    return out


def silu(site: Site, kernel: str, addresses: list[int], count: int, dtype: str) -> None:
    each, suffix = vector_width(count, dtype)
    grid = min(blocks(count, 256 * each), 8 * site.ctx.device.info.num_sms)
    site.launch(f"{kernel}_{dtype}{suffix}", (grid, 1, 1), 256, [*map(ptr, addresses), i64(count)])


@handles("linear")
def _linear(site: Site) -> None:
    s, dtype = site.sizes(), site.dtype("a")
    out_dtype = site.dtype("out")
    if out_dtype not in (dtype, "f32"):
        raise site.refuse("dtype of out", f"{dtype} or f32", out_dtype)
    kind = "store" if out_dtype == dtype else "storef32"
    problem = GemmProblem(s["T"], s["N"], s["K"], dtype, kind)
    project(site, problem, site.address("out"), site.address("a"), site.matrix("w", dtype=dtype))


@handles("linear_residual")
def _linear_residual(site: Site) -> None:
    s, dtype = site.sizes(), site.dtype("a")
    if site.dtype("x") != dtype:
        raise site.refuse("dtype of x", dtype, site.dtype("x"))
    problem = GemmProblem(s["T"], s["N"], s["K"], dtype, "residual")
    x, a, w = site.address("x"), site.address("a"), site.matrix("w", dtype=dtype)
    project(site, problem, x, a, w, next_norm=_next_norm(site))


def _next_norm(site: Site) -> int | None:
    """Address of the weight with which the op that follows normalises every row of this one's x.

    None in float16: x times a norm's weight, not yet scaled, could overflow.
    """
    following = site.following
    if following is None or "norm" not in following.tensors or "rows" in following.tensors:
        return None
    x, norm = following.tensors["x"], following.tensors["norm"]
    if x.storage is not site.this.tensors["x"].storage or x.dtype != "bf16" or norm.kind is not Kind.WEIGHT:
        return None
    return site.weights.vector(norm.storage).address


def _sixteen(call: OpCall) -> bool:
    x = call.tensors["x"]
    return x.dtype in SIXTEEN and isinstance(x.shape[1], int) and x.shape[1] % 8 == 0


@handles("gate_up_swiglu", whole=_sixteen)
def _gate_up(site: Site) -> None:
    s, dtype = site.sizes(), site.dtype("x")
    problem = GemmProblem(s["T"], 2 * s["F"], s["M"], dtype, "swiglu", norm=True)
    project(
        site, problem, site.address("out"), site.address("x"),
        site.matrix("w_gate", "w_up", dtype=dtype, layout="pairs"),
        norm=site.vector("norm"), eps=site.this.attrs["eps"],
    )  # fmt: skip


@handles("lm_head", whole=_sixteen)
def _lm_head(site: Site) -> None:
    s, dtype = site.sizes(), site.dtype("x")
    problem = GemmProblem(s["L"], s["V"], s["M"], dtype, "storef32", norm=True)
    project(
        site, problem, site.address("logits"), site.address("x"), site.matrix("w", dtype=dtype),
        norm=site.vector("norm"), rows=site.address("rows"), eps=site.this.attrs["eps"],
    )  # fmt: skip
