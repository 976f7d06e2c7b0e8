"""Programs that keep the choices of their mixtures."""

from __future__ import annotations

import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.forward import forward as dense_forward
from pegainfer.models.qwen3.forward import groups as dense_groups
from pegainfer.models.qwen3.weights import TABLE as DENSE_TABLE
from pegainfer.models.qwen3_moe.config import Qwen3MoeConfig
from pegainfer.models.qwen3_moe.forward import forward, groups
from pegainfer.models.qwen3_moe.weights import TABLE
from pegainfer.ops.expert_counts import Choices, choices_of, counting
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import Formats, Sizes
from tests.support.tinyqwen3 import MODELS as DENSE
from tests.support.tinyqwen3moe import MODELS


def test_each_layer_with_experts_has_an_output() -> None:
    c = Qwen3MoeConfig.from_hf(MODELS["every_second_f16"].hf_config(), "config.json")
    sizes = Sizes(groups(c, 16, Formats()), (8,), 32)
    plain = forward(c, dict.fromkeys(TABLE.shapes(c), "f16"), sizes)
    assert choices_of(plain) == ()
    program = counting(plain)
    wanted = (Choices("experts.1", 1, 6), Choices("experts.3", 3, 6))
    assert choices_of(program) == wanted
    assert choices_of(program.lowered(lambda _: False)) == wanted
    names = {t.name for t in program.tensors(Kind.OUTPUT)}
    assert names == {"x", "logits", "experts.1", "experts.3"}


def test_a_dense_model_has_nothing_to_count() -> None:
    c = Qwen3Config.from_hf(next(iter(DENSE.values())).hf_config(), "config.json")
    sizes = Sizes(dense_groups(c, 16, Formats()), (8,), 32)
    program = dense_forward(c, dict.fromkeys(DENSE_TABLE.shapes(c), "f32"), sizes)
    with pytest.raises(ConfigError, match="no experts to count"):
        counting(program)
