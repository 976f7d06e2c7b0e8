"""What plans assume of the card is what the driver says, and a plan is what is launched."""

from __future__ import annotations

import pytest

from pegainfer.lower.cuda.attention_choice import AttentionProblem, block_of
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.lowering import Step
from pegainfer.lower.cuda.plan import PlannedLaunch
from pegainfer.lower.cuda.planning import plan_program
from pegainfer.lower.cuda.target import Target, card_of
from pegainfer.runtime.cuda.device import CLUSTER
from pegainfer.runtime.cuda.launch import Launch, active_clusters
from tests.support.launch_lists import Case, executor, recorded


def test_blocks_that_share_an_sm_are_counted_as_the_driver_counts_them(ctx: CudaContext) -> None:
    compiled = [v for unit in ctx.library.manifest.units for v in unit.variants]
    checked = 0
    for v in compiled:
        if not v.name.startswith("attention_") or not {"ring", "shared"} & set(v.features):
            continue
        for group in (1, 4, 8):
            p = AttentionProblem(
                8, 8, 2 * group, 2, int(v.features["head"]), 16, 64, v.features["dtype"], True
            )
            block = block_of(p, ctx.target, v.name)
            got = ctx.target.blocks_per_sm(v.name, *block)
            assert got == ctx.library.kernel(v.name).blocks_per_sm(*block), (v.name, group)
            checked += 1
    assert checked >= 18


def test_clusters_are_those_that_attention_of_one_row_gets(ctx: CudaContext) -> None:
    info = ctx.target.info
    if info.arch != "90a":
        pytest.skip("only Hopper's attention of one row runs in clusters")
    kernel = ctx.library.kernel("attention_decode_row_bf16_d128")
    assert info.clusters == active_clusters(kernel, CLUSTER, 224, info.max_shared) > 0


@pytest.mark.parametrize("model", ["Qwen3-4B", "Qwen3-8B", "SmolLM2-135M"])
def test_a_plan_made_without_the_gpu_is_what_is_bound(model: str, ctx: CudaContext) -> None:
    """But for clusters, of which cards of one type may have different numbers."""
    card = card_of(ctx.target.info.arch)
    if (card.num_sms, card.clusters) != (ctx.target.info.num_sms, ctx.target.info.clusters):
        pytest.skip(f"another card than {card.name}: {ctx.target.info}")
    case = Case(model, layers=2)
    made = executor(case, ctx)
    for tokens, rows in ((1, 1), (2, 2), (8, 8), (17, 17), (64, 64), (160, 160), (5, 1), (512, 8)):
        env, decode = {"T": tokens, "R": rows, "L": rows}, tokens == rows
        bound = [
            (w.kernel.name, w.grid, w.block, w.shared) if isinstance(w, Launch) else "library"
            for w in made._lowered(env, decode).work
        ]
        plan = plan_program(recorded(case), Step(Target(card), env, decode))
        planned = [
            (p.kernel, p.grid, p.block, p.shared) if isinstance(p, PlannedLaunch) else "library"
            for p in plan.launches
        ]
        assert planned == bound, env
