"""What each rank has of a llama or Qwen3 model: its heads and units, and the weights that belong to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.load import open_model
from pegainfer.contract.errors import ConfigError
from pegainfer.models.llama.config import LlamaConfig
from pegainfer.ops.ranks import TensorRank, config_of_rank
from tests.support.tinydeepseek import MODELS as DEEPSEEK_MODELS
from tests.support.tinymodel import MODELS, Tiny, by_role, write_checkpoint, write_gguf
from tests.support.tinyqwen3 import MODELS as QWEN3_MODELS
from tests.support.tinyqwen3_5 import MODELS as QWEN3_5_MODELS
from tests.support.tinyqwen3_5moe import MODELS as QWEN3_5_MOE_MODELS
from tests.support.tinyqwen3moe import MODELS as QWEN3_MOE_MODELS

HEADS, KV_HEADS, HEAD_DIM, UNITS = 4, 2, 16, 96  # of the tiny llama models


def values(path: Path, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    with open_model(path, at=TensorRank(rank, ranks)) as (model, _):
        return {name: w.values() for name, w in model.tensors(8).items()}


@pytest.mark.parametrize("form", ["checkpoint", "gguf"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_has_its_heads_and_units(form: str, ranks: int, tmp_path: Path) -> None:
    """With four ranks, two share each of the two KV heads: those whose query heads read it."""
    model = MODELS["tied_f32"]
    if form == "checkpoint":
        path = write_checkpoint(model, tmp_path)
    else:
        path = write_gguf(model, tmp_path / "m.gguf", by_role("f32", "f32", "f32"))
    whole = values(path)
    for rank in range(ranks):
        own = values(path, rank, ranks)
        assert own.keys() == whole.keys()
        heads, units = HEADS // ranks, UNITS // ranks
        group = range(rank * heads * KV_HEADS // HEADS, ((rank + 1) * heads - 1) * KV_HEADS // HEADS + 1)
        q = slice(rank * heads * HEAD_DIM, (rank + 1) * heads * HEAD_DIM)
        kv = slice(group.start * HEAD_DIM, group.stop * HEAD_DIM)
        ff = slice(rank * units, (rank + 1) * units)
        parts = {
            "wq": (q,), "wk": (kv,), "wv": (kv,), "wo": (slice(None), q),
            "w_gate": (ff,), "w_up": (ff,), "w_down": (slice(None), ff),
        }  # fmt: skip
        for name, array in whole.items():
            where = parts.get(name.rpartition(".")[2], (slice(None),))
            np.testing.assert_array_equal(own[name], array[where], err_msg=name)


def test_programs_of_several_ranks_keep_their_sums(tmp_path: Path) -> None:
    from pegainfer.app.bounds import model_groups, runner_bounds, step_formats
    from pegainfer.app.config import EngineConfig
    from pegainfer.engine.config import SchedulerConfig

    config, scheduler = EngineConfig(), SchedulerConfig()
    for folder, tiny in (("llama", MODELS["tied_f32"]), ("qwen3", QWEN3_MODELS["tied_bf16"])):
        path = write_checkpoint(tiny, tmp_path / folder)
        for ranks, names in ((1, set()), (2, {"reduce_residual"})):
            with open_model(path, at=TensorRank(0, ranks)) as (model, _):
                info = runner_bounds(model, 2, 64, (8,), config, scheduler)
                made = model.programs(info, model_groups(model, config), step_formats(config), 5)
            calls = [call.spec.name for call in made["forward"].calls]
            assert {name for name in calls if "reduce" in name} == names
            assert calls.count("linear_residual") == (4 if ranks == 1 else 0)


@pytest.mark.parametrize(
    ("change", "ranks"),
    [
        ({}, 3),
        ({}, 8),
        ({"intermediate_size": 90}, 4),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change: dict[str, int], ranks: int) -> None:
    config = LlamaConfig.from_hf(
        Tiny("m", seed=1, config={"head_dim": 16, **change}).hf_config(), "config.json"
    )
    with pytest.raises(ConfigError, match=f"does not divide among so many ranks; .*; got {ranks}"):
        config_of_rank(config, TensorRank(0, ranks))


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize(
    "tiny",
    [
        *(next(iter(m.values())) for m in (DEEPSEEK_MODELS, QWEN3_MOE_MODELS, QWEN3_5_MOE_MODELS)),
        *(next(iter(m.values())) for m in (MODELS, QWEN3_MODELS, QWEN3_5_MODELS)),
    ],
    ids=lambda tiny: type(tiny).__name__,
)
def test_a_number_of_ranks_that_does_not_fit_is_refused_by_its_option(
    tiny: Tiny, whole_experts: bool, tmp_path: Path
) -> None:
    path = write_checkpoint(tiny, tmp_path)
    message = "so many ranks; .* at tensor_parallel_size|model without experts; at enable_expert_parallel"
    with pytest.raises(ConfigError, match=message), open_model(path, at=TensorRank(0, 3, whole_experts)):
        pass
