"""Every line on tensor-parallel ranks: its bounds, and one rank's tokens under random traffic."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.load import open_model
from pegainfer.app.memory import sequence_bytes, state_bytes
from pegainfer.ops.ranks import TensorRank
from pegainfer.runner.program import Formats
from tests.cpu.models.test_tiny import DATA, LINES
from tests.support import deepseekgguf, tinyqwen3_5
from tests.support.hybrid_traffic import LENGTH, run
from tests.support.tinydeepseek import V2, V3, TinyDeepseek
from tests.support.tinymodel import Tiny, by_role, token_ids, write_checkpoint
from tests.support.tinyqwen3_5 import TextOnly
from tests.support.tinyqwen3_5moe import TinyQwen3_5Moe
from tests.support.tinyqwen3moe import TinyQwen3Moe, with_router
from tests.support.tinyrun import compare, forced

STEPS = int(os.environ.get("PEGAINFER_RANK_STEPS", "150"))
FLOATS = Formats()
ALONE = {"tensor_parallel_size": 1, "enable_expert_parallel": False}
TIE = 1e-3  # nat; the lines' bound of float32 against float32 is 1e-2
# Models whose heads and units divide among so many ranks.
GOLDEN = [
    (line, name, ranks)
    for line, names in {
        "qwen3_moe": {
            "all_experts_bf16": (2, 4), "one_dense_f32_shards": (2,), "every_second_f16": (2,),
            "gguf_bf16": (2,),
        },
        "deepseek_v2": {
            "lite_bf16": (2, 4), "grouped_f32_shards": (4,), "v3_bf16": (2,), "kimi_text_f32": (2,),
            "gguf_fused_bf16": (2,),
        },
        "qwen3_5": {"published_bf16": (2,), "text_only_f32_shards": (2,), "yarn_f16": (2,)},
        "qwen3_5 with experts": {"moe_published_bf16": (2,), "moe_one_by_one_f32_shards": (2,)},
    }.items()
    for name, counts in names.items()
    for ranks in counts
]  # fmt: skip
# Of models with experts: each rank has some whole ones, also of quantised files with few columns.
WHOLE = [
    ("qwen3_moe", "all_experts_bf16", 2),
    ("qwen3_moe", "all_experts_bf16", 4),
    ("qwen3_moe", "every_second_f16", 2),
    ("qwen3_moe", "gguf_q4_1", 2),
    ("deepseek_v2", "grouped_f32_shards", 4),
    ("deepseek_v2", "v3_bf16", 2),
    ("qwen3_5 with experts", "moe_gguf_q4_1_fused", 2),
]
CASES = [(*case, False) for case in GOLDEN] + [(*case, True) for case in WHOLE]


@pytest.mark.parametrize(("line", "name", "ranks", "whole"), CASES)
def test_ranks_keep_the_bounds_of_their_line(
    line: str, name: str, ranks: int, whole: bool, tmp_path: Path
) -> None:
    """`whole`: with whole experts."""
    tiny = LINES[line]
    path, ids = tiny.written(name, tmp_path)
    golden = np.load(DATA / tiny.golden)
    found = compare(
        path, ids, golden, name, "cpu", None, tensor_parallel_size=ranks, threads=1,
        enable_expert_parallel=whole,
    )  # fmt: skip
    assert found.greedy == found.wanted
    assert found.errors.mean() <= tiny.mean
    assert found.errors.max() <= tiny.most


FOUR_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_key_value_heads": 4}
LONG = {"max_position_embeddings": 512}
# By name a model, the number of ranks, and whether they have whole experts.
MODELS: dict[str, tuple[Tiny, int, bool]] = {
    "qwen3_moe": (TinyQwen3Moe("m", seed=5, config=LONG), 2, False),
    "qwen3_moe, four": (TinyQwen3Moe("m", seed=6, config=LONG), 4, False),
    "qwen3_moe, whole experts": (TinyQwen3Moe("m", seed=12, config=LONG), 4, True),
    "deepseek_v2": (TinyDeepseek("m", seed=7, config=V2), 2, False),
    "deepseek_v2, whole experts": (TinyDeepseek("m", seed=13, config=V2), 2, True),
    "deepseek_v3, four": (TinyDeepseek("m", seed=8, config=V3), 4, False),
    "qwen3_5": (TextOnly("m", seed=9), 2, False),
    "qwen3_5, four": (TextOnly("m", seed=10, config=FOUR_HEADS), 4, False),
    "qwen3_5 with experts": (TinyQwen3_5Moe("m", seed=11), 2, False),
}


def memory_of(folder: Path, ranks: int, formats: Formats = FLOATS) -> dict[str, Any]:
    """Of all ranks together: pages for two and a half sequences, 8 states and 24 snapshots."""
    with open_model(folder, at=TensorRank(0, ranks)) as (model, _):
        groups = model.groups(16, formats)
    states = ranks * state_bytes(groups)
    pages = (ranks * sequence_bytes(groups, LENGTH) - states) * 5 // 2
    found: dict[str, Any] = {"kv_cache_memory": 33 * states + pages}
    if states:
        found["snapshot_share"] = 24.5 * states / (24.5 * states + pages)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_random_traffic_gives_the_tokens_of_one_rank(name: str, tmp_path: Path) -> None:
    """Preemption, prefix hits, chunks and cancels; tokens may part at near ties alone."""
    model, ranks, whole = MODELS[name]
    folder = write_checkpoint(model, tmp_path)
    seen = run(
        folder, STEPS, tie=TIE, alone=ALONE, backend="cpu", activation="f32",
        threads=1, tensor_parallel_size=ranks, enable_expert_parallel=whole, **memory_of(folder, ranks),
    )  # fmt: skip
    assert seen["differences"] == 0
    hits = ("state hits", "snapshots restored") if "qwen3_5" in name else ("prefix tokens hit",)
    for event in ("preemptions", "page blocks hit", "chunks", "following rows", "repeated steps", *hits):
        assert seen[event] > 0, f"no {event}"


# Quantised files whose blocks of 32 columns divide among two ranks.
QUANTISED: dict[str, tuple[Any, Tiny]] = {
    # Two value heads a key head, in the order of GGUF files: a rank has two ranges of the columns of w_out.
    "qwen3_5": (
        tinyqwen3_5.write_gguf,
        TextOnly("m", seed=3, config={"linear_value_head_dim": 32, "intermediate_size": 128}),
    ),
    "deepseek_v2": (
        partial(deepseekgguf.write_gguf, split=True),
        TinyDeepseek(
            "m", seed=4,
            config=V2 | {"moe_intermediate_size": 64, "v_head_dim": 32, "intermediate_size": 128},
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", QUANTISED)
def test_quantised_files_divide_between_blocks(line: str, tmp_path: Path) -> None:
    write, model = QUANTISED[line]
    path = write(model, tmp_path / "m.gguf", with_router(by_role("q8_0", "q8_0", "q8_0")))
    one, two = (
        forced(
            path, token_ids(model), "m", 8, backend="cpu", activation="f32", tensor_parallel_size=ranks,
            threads=1,
        )
        for ranks in (1, 2)
    )  # fmt: skip
    assert one[1] == two[1]
    errors = [abs(a.logprob - b.logprob) for a, b in zip(one[0], two[0], strict=True)]
    assert max(errors) <= LINES[line].most
