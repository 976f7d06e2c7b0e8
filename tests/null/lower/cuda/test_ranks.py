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
from pegainfer.runtime.cuda.arguments import GATHER_RANKS, SUM_RANKS
from pegainfer.runtime.cuda.peers import PART_BYTES, PART_VALUES, TAGGED_BYTES
from tests.null.lower.cuda import test_rewrite

CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
CARD = card_of("90a")


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
    at: TensorRank, tokens: int, rows: int, name: str = "forward", config: dict[str, Any] = CONFIG
) -> StepPlan:
    target = Target(CARD, ranks=at.ranks, rank=at.rank)
    env = {"T": tokens, "R": rows, "L": rows}
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
def test_each_layer_has_two_sums_and_the_logits_are_gathered(tokens: int) -> None:
    rows = min(tokens, 64)
    alone, shared = (kernels(planned(TensorRank(0, n), tokens, rows)) for n in (1, 2))
    assert not any("ranks" in name for name in alone)
    found = [name for name in shared if "ranks" in name]
    nbytes = 4 * tokens * 1024
    kind = "tagged" if nbytes <= tagged_most(2) else "one_shot" if nbytes <= one_shot_most(2) else "two_shot"
    folded = 3 if tokens <= 64 else 0  # of the two layers' four sums: those with a norm behind them
    assert found[:4] == folded * ["sum_ranks_norm_bf16"] + (4 - folded) * [f"sum_ranks_{kind}_bf16"]
    assert set(found[4:]) == {"gather_ranks"}


@pytest.mark.parametrize(
    ("rows", "width", "ranks"),
    [
        (1, 4, 2),
        (1, 2560, 2),
        (102, 2560, 2),
        (103, 2560, 2),
        (14, 2560, 8),
        (15, 2560, 8),
        (102, 2560, 8),
        (103, 2560, 8),
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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["forward", "prompt_logprobs"])
def test_a_rank_multiplies_with_its_rows_of_the_head(name: str, rank: int) -> None:
    plan = planned(TensorRank(rank, 2), 64, 64, name)
    gathers = [p for p in plan.launches if isinstance(p, PlannedLaunch) and p.kernel == "gather_ranks"]
    rows = 0
    for launch in gathers:
        given = members(GATHER_RANKS, launch)
        assert (given["columns"], given["each"]) == (151936, 75968)
        assert isinstance(given["rows"], int) and 4 * given["rows"] * 75968 <= PART_BYTES
        assert isinstance(given["out"], Place) and given["out"].offset == 4 * rows * 151936
        rows += given["rows"]
    assert rows == 64
