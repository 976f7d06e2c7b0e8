"""Plans of a program's steps: which calls are rewritten, and which kernels run the rewritten calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pegainfer.lower.cuda import (  # noqa: F401  (they register)
    attention,
    delta,
    lora,
    mla,
    moe_shard,
    pointwise,
    ranks,
)
from pegainfer.lower.cuda.experts_few import ADD_GATED, ADD_SHARED, NORM_AFTER_EXPERTS
from pegainfer.lower.cuda.linear import FOLD_NORM
from pegainfer.lower.cuda.lowering import Step, choose, keeps_whole
from pegainfer.lower.cuda.mla import JOIN_MLA
from pegainfer.lower.cuda.moe import ADD_EXPERTS
from pegainfer.lower.cuda.plan import PlannedLaunch, StepPlan
from pegainfer.lower.cuda.qkv import FINISH_AND_GATE, FINISH_IN_ATTENTION
from pegainfer.lower.cuda.rank_norm import NORM_AFTER_SUM
from pegainfer.lower.cuda.rewrite import Rule, rewrite
from pegainfer.lower.cuda.row_pass import ONE_LAUNCH
from pegainfer.lower.cuda.sampling import LEAVE_PLAIN_ROWS
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.packed import OF_FORMAT

# The order matters: rules that join calls come before those that fold a norm into the calls that result. So a
# norm can be folded into the GEMM of heads that attention finishes, and begun by experts with a shared one.
RULES = (
    ONE_LAUNCH,
    ADD_SHARED,
    ADD_GATED,
    FINISH_IN_ATTENTION,
    FINISH_AND_GATE,
    JOIN_MLA,
    FOLD_NORM,
    NORM_AFTER_SUM,
    ADD_EXPERTS,
    NORM_AFTER_EXPERTS,
    LEAVE_PLAIN_ROWS,
)


# Kernels that are in no plan of one rank: they generate and convert weights, measure the card, keep a
# runner's state, and sum and gather over ranks.
SUPPORT = frozenset(
    {
        "launch_nothing", "read_bandwidth", "decode_inputs", "publish_drawn", "append_tokens", "take_rows_32",
        "quantize_weight_bf16", "count_experts",
        *(f"fill_normal_{dtype}" for dtype in ("bf16", "f16", "f32")), "convert_f32_bf16",
        "sum_ranks_tagged_bf16", "sum_ranks_norm_bf16", "sum_ranks_one_shot_bf16", "sum_ranks_two_shot_bf16",
        "gather_ranks", "local_experts", "sample_meet", "sample_pick_ranks",
    }
)  # fmt: skip


def rules(*, row_pass: bool = True, fused: bool = True) -> tuple[Rule, ...]:
    """The rules that rewrite steps.

    Args:
        row_pass: a step of one decoded row is one launch, where a kernel serves it.
        fused: without, each call leaves all that it declares.
    """
    return tuple(r for r in RULES if fused and (row_pass or r is not ONE_LAUNCH))


def plan_program(program: Program, step: Step) -> StepPlan:
    """A recorded program's step as an executor launches it, made without a GPU.

    Raises UnsupportedError where no kernel serves an op.
    """
    return plan_step(program.lowered(keep=keeps_whole, ranks=step.target.ranks).calls, step, rules())


def chosen_kernels(program: Program, steps: Iterable[Step]) -> set[str]:
    """Every kernel that steps of these sizes may launch, whatever an executor's options are, and those that
    pack its weights.
    """
    calls = program.lowered(keep=keeps_whole).calls
    sets = (rules(), rules(row_pass=False), rules(fused=False))
    launched = {
        launch.kernel
        for step in steps
        for applied in sets
        for launch in plan_step(calls, step, applied).launches
        if isinstance(launch, PlannedLaunch)
    }
    packed = {t.dtype for t in program.tensors(Kind.WEIGHT) if t.dtype in OF_FORMAT}
    return launched | {f"pack_{name}" for name in packed}


def plan_step(calls: Sequence[OpCall], step: Step, applied: Sequence[Rule]) -> StepPlan:
    """Rewrites and chooses. Pure: no driver is asked.

    Args:
        calls: of a program whose coarse calls are lowered but for those that have kernels.

    Raises UnsupportedError where no kernel serves an op.
    """
    rewritten = rewrite(calls, step, applied)
    plan = choose(rewritten.calls, step)
    for name, t in rewritten.temporaries.items():
        plan.reserve(name, t.nbytes(step.env))
    plan.applied, plan.lacking = rewritten.applied, rewritten.lacking
    return plan
