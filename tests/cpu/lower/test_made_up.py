"""Weights that are made up: seeded by their names, of order one, and served like any others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.offline import LLM
from pegainfer.app.sampling_params import SamplingParams
from pegainfer.lower.cpu.packed import PackedWeight, packed_bytes, reserve
from pegainfer.runtime.weights.made_up import made_up
from pegainfer.runtime.weights.weight import Weight, plain
from tests.support.qwentext import write_text
from tests.support.tinyqwen3_5moe import TinyQwen3_5Moe


def without_values(*shape: int) -> Weight:
    return Weight(plain("bf16"), shape, {})


def test_values_depend_on_the_name_alone() -> None:
    first, again = (made_up("layers.0.w_up", without_values(5, 24, 64)).values() for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, made_up("layers.1.w_up", without_values(5, 24, 64)).values())


def test_matrices_keep_activations_of_order_one() -> None:
    x = np.random.default_rng(1).standard_normal(512)
    for name, size in (("layers.3.wq", 1.0), ("lm_head", 8.0)):
        product = made_up(name, without_values(4096, 512)).values() @ x
        assert 0.8 * size < product.std() < 1.2 * size
    np.testing.assert_array_equal(made_up("layers.3.norm", without_values(7)).values(), np.ones(7))


def test_a_packed_stack_holds_the_values() -> None:
    weight = made_up("layers.2.w_gate", without_values(3, 20, 96))
    packed = PackedWeight(weight, reserve(packed_bytes("bf16", weight.shape)), 2)
    np.testing.assert_array_equal(packed.unpack(), weight.values().reshape(-1, 96))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_model_without_weights_answers(backend: str, tmp_path: Path) -> None:
    model = TinyQwen3_5Moe("dummy", seed=0, config={"vocab_size": 512})
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config()))
    write_text(tmp_path)
    with LLM(
        str(tmp_path), device=backend, load_format="dummy", activation_dtype="f32", kv_cache_memory=1 << 22
    ) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        once, twice = (llm.generate([[1, 2, 3]], params) for _ in range(2))
    assert len(once[0].outputs[0].token_ids) == 8
    assert once[0].outputs[0].token_ids == twice[0].outputs[0].token_ids
