"""In which form a GPU holds the matrices of a quantised model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.bounds import model_groups
from pegainfer.app.config import EngineConfig
from pegainfer.app.gpu import log_expanded
from pegainfer.app.gpu_memory import Budget, quicker_form
from pegainfer.app.load import open_model
from pegainfer.runtime.weights.weight import Weight, plain
from tests.support.tinymodel import MODELS, write_gguf

MODEL, LENGTH = MODELS["untied_bf16_shards"], 64


def chosen(
    tmp_path: Path, room: float, formats: str = "q4_0", *, length: int = LENGTH, **config: Any
) -> tuple[bool, int]:
    """Whether the matrices are expanded, and the bytes counted for weights.

    Args:
        room: the cache's beside packed weights, over what expanding them takes.
        length: tokens of a sequence.
    """
    path = write_gguf(MODEL, tmp_path / "model.gguf", lambda name: "f32" if "norm" in name else formats)
    with open_model(path) as (model, _):
        packed, wide = (m.weight_bytes(LENGTH) for m in (model, model.expanded()))
        assert (packed < wide) == (formats == "q4_0")
        allowed = packed + int(room * (wide - packed))
        budget = Budget(allowed, 0, packed, 0, 0, allowed)
        asked = EngineConfig(**config)
        groups = model_groups(model, asked)
        found, after = quicker_form(model, groups, budget, length, asked, fp8=False)
        assert after.weights == found.weight_bytes(LENGTH)
        return found.expands, after.weights  # type: ignore[attr-defined]


def test_matrices_are_expanded_where_the_cache_keeps_half_its_room(tmp_path: Path) -> None:
    large, wide = chosen(tmp_path, 2.01)
    small, packed = chosen(tmp_path, 1.99)
    assert large and not small and packed < wide


def test_matrices_stay_packed_where_the_cache_would_lack_what_was_asked_for(tmp_path: Path) -> None:
    assert chosen(tmp_path, 100, kv_cache_memory=1 << 20)[0]
    assert not chosen(tmp_path, 100, kv_cache_memory=1 << 40)[0]


def test_matrices_stay_packed_where_one_sequence_would_not_fit(tmp_path: Path) -> None:
    assert not chosen(tmp_path, 100, length=1 << 30)[0]


@pytest.mark.parametrize("config", [{"quantization": "int4"}, {"tensor_parallel_size": 2}], ids=str)
def test_quantising_while_loading_and_ranks_keep_them_packed(tmp_path: Path, config: dict[str, Any]) -> None:
    assert not chosen(tmp_path, 100, backend="cuda", **config)[0]


def test_programs_follow(tmp_path: Path) -> None:
    """The same weights, asked for in bf16."""
    from pegainfer.app.bounds import runner_info, step_formats
    from pegainfer.engine.config import SchedulerConfig

    path = write_gguf(MODEL, tmp_path / "model.gguf", lambda name: "f32" if "norm" in name else "q4_0")
    config = EngineConfig(backend="cuda", max_model_len=LENGTH, kv_cache_memory=1 << 22)
    with open_model(path) as (model, _):
        groups = model_groups(model, config)
        info = runner_info(model, config, SchedulerConfig(max_slots=2))
        found = []
        for m in (model, model.expanded()):
            forward = m.programs(info, groups, step_formats(config), 0)["forward"]
            found.append({t.dtype for c in forward.calls for n, t in c.tensors.items() if n in ("w", "w_up")})
    assert found == [{"q4_0"}, {"bf16"}]


def stored_as(form: str, *shape: int) -> Weight:
    """A weight that nobody reads."""
    return Weight(plain(form), shape, {})


@pytest.mark.parametrize(
    ("fp8", "message"),
    [
        (True, "2 weights in fp8_r64 q4_k are expanded to bf16: no kernel takes them packed"),
        (False, "3 weights in fp8_r128 fp8_r64 q4_k are expanded to bf16: no kernel takes them packed"),
    ],
)
def test_weights_that_no_kernel_takes_packed_are_logged(
    fp8: bool, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Stacks of experts have no packed form, whatever their format has."""
    weights = {
        "plain": stored_as("bf16", 64, 256), "packed": stored_as("q4_k", 64, 256),
        "experts": stored_as("q4_k", 4, 64, 256), "kept": stored_as("fp8_r128", 64, 256),
        "narrow": stored_as("fp8_r64", 64, 64), "norm": stored_as("f32", 256),
    }  # fmt: skip
    with caplog.at_level(logging.INFO):
        log_expanded(weights, fp8=fp8)
    assert [r.getMessage() for r in caplog.records] == [message]
