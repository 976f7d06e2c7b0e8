"""Steps of one of several ranks, planned without a GPU: where sums stand, and who makes which logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import UnsupportedError
from pegainfer.contract.step import RunnerInfo
from pegainfer.kv.device.layout import kv_spec
from pegainfer.lower.cuda.lowering import Step, keeps_whole
from pegainfer.lower.cuda.plan import CONTROL, Place, PlannedLaunch, PlannedMatmul, StepPlan, Struct
from pegainfer.lower.cuda.planning import plan_program, plan_step, rules
from pegainfer.lower.cuda.ranks import MAX_BLOCKS, THREADS, WIDTH, one_shot_most, shard_of, tagged_most
from pegainfer.lower.cuda.rewrite import rewrite
from pegainfer.lower.cuda.target import Target, card_of
from pegainfer.models.qwen3 import engine as qwen3
from pegainfer.models.qwen3.forward import forward, groups
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.models.qwen3_moe import engine as qwen3_moe
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.ranks import TensorRank
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.arguments import (
    ADJUST_LOGITS,
    GATHER_RANKS,
    SAMPLE_TOKENS,
    SUM_RANKS,
    TOKEN_LOGPROBS,
)
from pegainfer.runtime.cuda.peers import PART_BYTES, PART_VALUES, TAGGED_BYTES
from tests.null.lower.cuda import test_rewrite

CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
CARD = card_of("90a")
NO_SIZES: dict[str, int] = {}


MOE_CONFIG = CONFIG | {
    "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip


def program(ranks: int, name: str = "forward", config: dict[str, Any] = CONFIG) -> Program:
    line = qwen3_moe if "num_experts" in config else qwen3
    model = line.from_config(config, "config.json", TensorRank(0, ranks))
    formats = Formats("bf16", "bf16", "bf16")
    groups = model.groups(16, formats)
    info = RunnerInfo(
        kv=kv_spec(groups), num_blocks=(64,), max_slots=64, max_tokens=2112, max_model_len=4096,
        vocab_size=model.vocab_size,
    )  # fmt: skip
    return model.programs(info, groups, formats, 5)[name]


def planned(
    at: TensorRank,
    tokens: int,
    rows: int,
    name: str = "forward",
    config: dict[str, Any] = CONFIG,
    more: dict[str, int] = NO_SIZES,
) -> StepPlan:
    target = Target(CARD, ranks=at.ranks, rank=at.rank)
    env = {"T": tokens, "R": rows, "L": rows, **more}
    return plan_program(program(at.ranks, name, config), Step(target, env, tokens == rows))


def kernels(plan: StepPlan) -> list[str]:
    return [p.kernel if isinstance(p, PlannedLaunch) else "library" for p in plan.launches]


def members(layout: object, launch: PlannedLaunch) -> dict[str, object]:
    (args,) = launch.args
    assert isinstance(args, Struct)
    return dict(zip([f.name for f in layout.fields], args.values, strict=True))  # type: ignore[attr-defined]


def sums(rows: int, width: int, ranks: int) -> list[PlannedLaunch]:
    """The launches of one sum of bf16."""
    tensors = {
        "x": Tensor("x", ("T", width), "bf16", Kind.OUTPUT),
        "partial": Tensor("partial", ("T", width), "f32", Kind.BUFFER),
    }
    call = OpCall.of(REDUCE_RESIDUAL, {}, **tensors)
    step = Step(Target(CARD, ranks=ranks), {"T": rows}, False)
    found = list(plan_step([call], step, rules()).launches)
    return [p for p in found if isinstance(p, PlannedLaunch)]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_sum_takes_the_norm_behind_it_along(rows: int) -> None:
    """By the references in float64, in which a rank's own part is the sum."""
    formats, sixteen = (
        dict.fromkeys(TABLE.shapes(test_rewrite.CONFIG), "bf16"),
        Formats("bf16", "bf16", "bf16"),
    )
    sizes = Sizes(groups(test_rewrite.CONFIG, 16, sixteen), (test_rewrite.BLOCKS,), 64)
    calls = forward(test_rewrite.CONFIG, formats, sizes, sixteen).lowered(keep=keeps_whole, ranks=2).calls
    at = Step(Target(CARD, ranks=2), {"T": rows, "R": rows, "L": rows}, True)
    found = rewrite(calls, at, rules())
    names = [call.spec.name for call, _ in found.calls]
    assert names.count("reduce_residual_norm") == 3 and names.count("reduce_residual") == 1
    given = {**test_rewrite.constants(calls), **test_rewrite.inputs(rows)}
    both = (calls, [call for call, _ in found.calls])
    want, got = (test_rewrite.interpret(c, dict(at.env), given) for c in both)
    for name in ("x", "logits", "kv"):
        assert np.isfinite(want[name]).all()
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-11)
    alone = rewrite(calls, replace(at, target=Target(CARD)), rules())
    assert "several ranks" in alone.lacking["norm_after_sum"]
    many = rewrite(calls, replace(at, env={"T": 65, "R": 65, "L": 65}), rules())
    assert many.lacking["norm_after_sum"] == "few bytes"


@pytest.mark.parametrize("tokens", [1, 8, 64, 128, 1024])
def test_each_layer_has_two_sums_and_no_logits_are_gathered(tokens: int) -> None:
    rows = min(tokens, 64)
    alone, shared = (kernels(planned(TensorRank(0, n), tokens, rows)) for n in (1, 2))
    assert not any("ranks" in name for name in alone)
    found = [name for name in shared if "ranks" in name]
    nbytes = 4 * tokens * 1024
    kind = "tagged" if nbytes <= tagged_most(2) else "one_shot" if nbytes <= one_shot_most(2) else "two_shot"
    folded = 3 if tokens <= 64 else 0  # of the two layers' four sums: those with a norm behind them
    assert found[:4] == folded * ["sum_ranks_norm_bf16"] + (4 - folded) * [f"sum_ranks_{kind}_bf16"]
    assert found[4:] == []


@pytest.mark.parametrize(
    ("rows", "width", "ranks"),
    [
        (1, 4, 2),
        (1, 2560, 2),
        (38, 2560, 2),
        (39, 2560, 2),
        (204, 2560, 2),
        (205, 2560, 2),
        (5, 2560, 8),
        (6, 2560, 8),
        (29, 2560, 8),
        (30, 2560, 8),
        (2304, 4096, 2),
        (2304, 4096, 8),
        (513, 8192, 3),
    ],
)
def test_the_launches_of_a_sum_cover_it_once(rows: int, width: int, ranks: int) -> None:
    at = 0
    for launch in sums(rows, width, ranks):
        given = members(SUM_RANKS, launch)
        count = given["count"]
        assert (
            isinstance(count, int) and isinstance(given["x"], Place) and isinstance(given["partial"], Place)
        )
        assert (given["x"].offset, given["partial"].offset) == (2 * at, 4 * at)
        assert given["control"] == Place(CONTROL)
        assert ("tagged" in launch.kernel) == (4 * rows * width <= tagged_most(ranks))
        assert ("two_shot" in launch.kernel) == (4 * rows * width > one_shot_most(ranks))
        one_shot = "two_shot" not in launch.kernel
        # What a rank sends another one in a phase: everything, or its share in whole groups.
        sent = count if one_shot else (count + ranks * WIDTH - 1) // (ranks * WIDTH) * WIDTH
        assert sent <= (TAGGED_BYTES // 8 if "tagged" in launch.kernel else PART_VALUES)
        assert count % WIDTH == 0
        blocks = launch.grid[0]
        assert 1 <= blocks <= MAX_BLOCKS and launch.block == THREADS
        at += count
    assert at == rows * width


@pytest.mark.parametrize("tokens", [1, 8, 64, 1024])
def test_ranks_choose_the_same_experts(tokens: int) -> None:
    """The library's algorithm for the router is not picked by timing, in which GPUs may differ."""
    for ranks in (1, 2):
        plan = planned(TensorRank(0, ranks), tokens, min(tokens, 64), config=MOE_CONFIG)
        launches = [p for p in plan.launches if isinstance(p, PlannedMatmul)]
        routers = [p.problem.alike for p in launches if p.problem.n == 64]
        assert routers == [ranks > 1] * len(routers)
        assert len(routers) == (2 if tokens > 64 else 0)
        assert not any(p.problem.alike for p in launches if p.problem.n != 64)


def test_a_width_of_no_whole_groups_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="N; expected a multiple of 4; got 33"):
        sums(3, 33, 2)
    assert [p.kernel for p in sums(3, 33, 1)] == ["reduce_residual_bf16"]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [1000, 4096, 49152, 151936, 36])
def test_every_column_of_the_logits_is_made_by_one_rank(columns: int, ranks: int) -> None:
    shards = [shard_of(columns, Target(CARD, ranks=ranks, rank=rank)) for rank in range(ranks)]
    if columns == 36 and ranks > 3:  # a rank would have none
        assert shards == [None] * ranks
        return
    made = [column for shard in shards if shard is not None for column in shard]
    assert made == list(range(columns))
    assert all(shard is not None and shard.start % 16 == 0 for shard in shards)


def test_a_vocabulary_of_no_whole_groups_is_not_shared() -> None:
    assert shard_of(1001, Target(CARD, ranks=2)) is None


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_the_sampler_looks_at_its_own_columns(ranks: int, rows: int) -> None:
    """Ranks exchange words, 64 rows a launch, and whole logits for log-probabilities alone."""
    sizes = dict.fromkeys("JEUO", 0)
    for rank in range(ranks):
        plan = planned(TensorRank(rank, ranks), rows, rows, "sampler", more=sizes)
        names = kernels(plan)
        parts = -(-rows // 64)
        if ranks == 1:
            assert names.count("sample_pick") == 1 and not any("ranks" in n or "meet" in n for n in names)
            assert names[0] == "adjust_logits"
            continue
        own = shard_of(151936, Target(CARD, ranks=ranks, rank=rank))
        assert own is not None
        assert [names.count(n) for n in ("sample_meet", "sample_pick_ranks", "gather_ranks")] == [
            parts, parts, 1,
        ]  # fmt: skip
        starts = []
        for launch in plan.launches:
            assert isinstance(launch, PlannedLaunch)
            if not launch.kernel.startswith(("sample_", "adjust")):
                continue
            given = members(ADJUST_LOGITS if launch.kernel == "adjust_logits" else SAMPLE_TOKENS, launch)
            assert (given["first"], given["columns"]) == (own.start, len(own))
            assert given["vocab"] == 151936
            if launch.kernel == "sample_pick_ranks":
                starts += range(int(str(given["start"])), int(str(given["start"])) + launch.grid[0])
                assert launch.grid[0] <= 64
        assert starts == list(range(rows))


@pytest.mark.parametrize("rank", [0, 1])
def test_prompts_log_probabilities_come_of_whole_logits(rank: int) -> None:
    plan = planned(TensorRank(rank, 2), 64, 64, "prompt_logprobs")
    launches = [p for p in plan.launches if isinstance(p, PlannedLaunch)]
    (gather,) = [p for p in launches if p.kernel == "gather_ranks"]
    given = members(GATHER_RANKS, gather)
    assert (given["columns"], given["each"], given["rows"]) == (151936, 75968, 64)
    assert 4 * int(str(given["most"])) * 75968 <= PART_BYTES
    assert [p.kernel for p in launches][-3:] == ["gather_ranks", "logprob_parts", "logprob_merge"]
    parts = members(TOKEN_LOGPROBS, launches[-2])
    assert parts["logits"] == given["out"] and parts["columns"] == 151936
