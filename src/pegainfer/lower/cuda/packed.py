"""GEMMs of quantised weights (common/packed): which weights stay packed, and their launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pegainfer.lower.cuda.lowering import LoweringContext, Operands, blocks
from pegainfer.lower.cuda.plan import ARRIVALS, Packed, Place, struct
from pegainfer.lower.cuda.skinny import KINDS, MAX_TOKENS, NextNorm, Scale
from pegainfer.lower.cuda.target import SYSTEM, Target
from pegainfer.ops.program import OpCall
from pegainfer.runtime.cuda.arguments import EXPAND, PACKED
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.packed import COLUMNS, OF_FORMAT, ROWS, PackedForm

TOKENS = (8, 16, 32, 64)  # of a cell, that kernels are compiled for
THREADS, CELL, MAX_DEPTH = 256, 128, 8  # CELL: rows of the weight
MOST_ROWS = 40  # of x; above, the expanded weight and the bf16 GEMMs are quicker
MOST_EXPANDED = 256 << 20  # bytes of scratch
STATIC = 6 << 10  # bytes of static shared memory, rounded up
EXPAND_BLOCKS = 8  # of an SM
DTYPE = "bf16"  # of activations


@dataclass(frozen=True)
class PackedChoice:
    """A launch of common/packed/gemm.cuh."""

    kernel: str
    tokens: int  # of a cell
    cells: int
    token_blocks: int
    chunks: int  # units of a cell
    blocks: int
    depth: int  # stages of the ring
    shared: int  # bytes
    most_tokens: int  # rows of x that sums of squares have room for
    why: str
    rows: int = CELL

    def square_groups(self, n: int) -> int:
        """How many sums of squares a row of `n` outputs leaves."""
        return blocks(n, CELL) * (CELL // 32)

    @property
    def reason(self) -> str:
        return (
            f"{self.blocks} blocks share {self.cells} cells of {self.chunks} x {COLUMNS} columns, "
            f"{self.depth} stages, {self.shared} B ({self.why})"
        )

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


@dataclass(frozen=True)
class ExpandChoice:
    """The weight is expanded to bf16, and a GEMM of that follows."""

    why: str

    def __str__(self) -> str:
        return f"expanded ({self.why})"


def form_of(call: OpCall, names: tuple[str, ...]) -> PackedForm | None:
    """The form in which these weights stay, as one matrix; None where they are expanded when they are loaded.

    They stay packed where all have the same form and two axes, and activations are bf16.
    """
    tensors = [call.tensors[name] for name in names]
    forms = {OF_FORMAT.get(t.dtype) for t in tensors}
    activation = call.tensors.get("a") or call.tensors.get("x") or call.tensors["out"]
    if len(forms) != 1 or activation.dtype != DTYPE or any(len(t.shape) != 2 for t in tensors):
        return None
    return forms.pop()


def forms_of(call: OpCall, names: tuple[str, ...]) -> list[tuple[tuple[str, ...], PackedForm]]:
    """Runs of weights that share a form, each with its operands; [] where a weight has no form."""
    runs: list[tuple[tuple[str, ...], PackedForm]] = []
    for name in names:
        form = form_of(call, (name,))
        if form is None:
            return []
        if runs and runs[-1][1] == form:
            runs[-1] = ((*runs[-1][0], name), form)
        else:
            runs.append(((name,), form))
    return runs


def linear_weight(c: Operands, *names: str, layout: str = "rows") -> Place:
    """The weight of a linear layer: packed, or expanded to the dtype of its activations."""
    form = form_of(c.call, names)
    if form is None:
        return c.matrix(*names, dtype=c.dtype("a" if "a" in c.call.tensors else "x"), layout=layout)
    return Place(Packed(tuple(c.call.tensors[n].storage for n in names), form.name, layout))


def choose_packed(m: int, n: int, k: int, form: PackedForm, target: Target) -> PackedChoice | ExpandChoice:
    """The kernel for x[m, k] · w[n, k]ᵀ with a weight in this form; a measured one where there is one."""
    tuned = target.tuning.find(target.info, "packed", m, n=n, k=k, bits=form.bits)
    if tuned is not None and tuned.numbers is not None:
        choice = packed_choice(m, n, k, form, target.info, **tuned.numbers)
        if choice is not None:
            return replace(choice, why=f"{m} rows; measured on {tuned.card} up to {tuned.most} rows")
    if m > MOST_ROWS and 2 * n * k <= MOST_EXPANDED:
        return ExpandChoice(f"{m} rows: the packed kernels are quicker up to {MOST_ROWS}")
    enough = next((t for t in TOKENS if m <= t), TOKENS[-1])
    for tokens in (t for t in reversed(TOKENS) if t <= enough):  # fewer where shared memory is short
        for per_sm in (2, 1):
            choice = packed_choice(m, n, k, form, target.info, tokens=tokens, per_sm=per_sm)
            if choice is not None:
                return choice
    return ExpandChoice("the packed kernels need more shared memory than a block has")


def packed_choice(
    m: int,
    n: int,
    k: int,
    form: PackedForm,
    info: DeviceInfo,
    *,
    tokens: int,
    per_sm: int,
    depth: int = MAX_DEPTH,
) -> PackedChoice | None:
    """That launch, with at most so many stages; None where it does not fit.

    Args:
        tokens: of a cell.
        per_sm: blocks that share an SM.
    """
    stage = CELL // ROWS * form.tile_bytes + tokens * COLUMNS * 2
    room = min(info.shared_per_sm // per_sm - SYSTEM, info.max_shared) - STATIC
    depth = min(depth, room // stage)
    if depth < 3:  # two for the product and the sums beside it, one to fetch into
        return None
    token_blocks = blocks(m, tokens)
    cells, chunks = blocks(n, CELL) * token_blocks, blocks(k, COLUMNS)
    grid = min(cells * chunks, per_sm * info.num_sms)
    most = next((t for t in (MAX_TOKENS, 128, 256) if m <= t), m)
    return PackedChoice(
        f"packed_{form.name}_{tokens}", tokens, cells, token_blocks, chunks, grid, depth, depth * stage, most,
        f"{m} rows; {per_sm} blocks an SM",
    )  # fmt: skip


def packed_gemm(
    c: LoweringContext,
    choice: PackedChoice,
    kind: str,
    sizes: tuple[int, int, int],
    out: Place,
    x: Place,
    w: Place,
    *,
    ld_out: int | None = None,
    scale: Scale | None = None,
    eps: float = 0.0,
    next_norm: NextNorm | None = None,
) -> None:
    """Lowers one GEMM; arguments as in `skinny`."""
    m, n, k = sizes
    left = (next_norm.norm, next_norm.normed, next_norm.squares) if next_norm else (None, None, None)
    norm, normed, next_squares = left
    args = struct(
        PACKED, out=out, x=x, w=w, partial=c.scratch(2 * choice.blocks * choice.tokens * CELL * 4),
        arrivals=Place(ARRIVALS), squares=scale.squares if scale else None, norm=norm, normed=normed,
        next_squares=next_squares, m=m, n=n, k=k, ld_out=ld_out or (n // 2 if kind == "swiglu" else n),
        kind=KINDS[kind], cells=choice.cells, token_blocks=choice.token_blocks, chunks=choice.chunks,
        depth=choice.depth, square_groups=scale.groups if scale else 0, squares_width=choice.most_tokens,
        eps=eps,
    )  # fmt: skip
    c.launch(choice.kernel, (choice.blocks, 1, 1), THREADS, [args], choice.shared, why=choice.reason)


def expand(c: LoweringContext, w: Place, n: int, k: int, why: str, out: Place | None = None) -> Place:
    """A packed weight [n, k] as bf16, in scratch where no place is given."""
    held = w.held
    assert isinstance(held, Packed)
    out = c.scratch(2 * n * k) if out is None else out
    args = struct(
        EXPAND, out=out, w=w, ids=None, rows=n, k=k, across=blocks(k, COLUMNS),
        pairs=int(held.layout == "pairs"),
    )  # fmt: skip
    grid = min(blocks(n, ROWS) * blocks(k, COLUMNS), EXPAND_BLOCKS * c.target.info.num_sms)
    c.launch(f"expand_{held.form}", (grid, 1, 1), 256, [args], why=why)
    c.finish_launches()
    return out


def take_packed_rows(
    c: LoweringContext, out: Place, w: Place, ids: Place, count: int, n: int, k: int
) -> None:
    """Rows of a packed matrix [n, k] as bf16; zeros for ids outside it."""
    held = w.held
    assert isinstance(held, Packed)
    args = struct(EXPAND, out=out, w=w, ids=ids, rows=n, k=k, across=blocks(k, COLUMNS), pairs=0)
    c.launch(f"take_{held.form}", (count, 1, 1), 256, [args], why=f"a table in {held.form}")
