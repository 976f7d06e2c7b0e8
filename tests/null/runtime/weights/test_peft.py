"""PEFT's adapter configs: which modules are adapted, with which rank and scale, what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.runtime.weights.peft import PeftConfig

LAYER = "model.layers.{}.{}"
Q, V, DOWN = "self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"


def read(**config: Any) -> PeftConfig:
    base = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    return PeftConfig.read(base | config, "adapter_config.json")


def adapted(config: PeftConfig, *parts: str, layers: int = 12) -> set[str]:
    names = [LAYER.format(i, p) for i in range(layers) for p in parts]
    return {n for n in names if config.adapts(n)}


def test_a_name_is_the_end_of_a_module_at_a_dot() -> None:
    config = read(target_modules=["proj", "self_attn.v_proj", "lm_head"])
    assert not config.adapts(LAYER.format(0, Q))
    assert config.adapts(LAYER.format(0, V))
    assert config.adapts("lm_head")


def test_an_expression_must_match_the_whole_name() -> None:
    config = read(target_modules=r".*\.layers\.1\..*(q_proj|v_proj)")
    assert adapted(config, Q, V, DOWN) == {LAYER.format(1, Q), LAYER.format(1, V)}
    assert not read(target_modules="q_proj").adapts(LAYER.format(0, Q))


def test_all_linear_leaves_out_embedding_and_head() -> None:
    config = read(target_modules="all-linear")
    assert adapted(config, Q, DOWN, layers=1) == {LAYER.format(0, Q), LAYER.format(0, DOWN)}
    assert not config.adapts("lm_head") and not config.adapts("model.embed_tokens")


def test_layers_and_exclusions() -> None:
    some = read(layers_to_transform=[1, 10])
    assert adapted(some, Q) == {LAYER.format(1, Q), LAYER.format(10, Q)}
    assert adapted(read(layers_to_transform=3, layers_pattern="layers"), Q) == {LAYER.format(3, Q)}
    assert adapted(read(layers_to_transform=[3], layers_pattern="blocks"), Q) == set()
    assert adapted(read(exclude_modules=r".*\.[0-9]\..*"), Q) == {LAYER.format(i, Q) for i in (10, 11)}
    assert adapted(read(target_modules=["q_proj", "v_proj"], exclude_modules=["q_proj"]), Q, V, layers=1) == {
        LAYER.format(0, V)
    }


def test_ranks_and_scales_by_the_first_pattern() -> None:
    config = read(
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 8, r"layers\.\d\..*q_proj": 2, "_proj": 64},
        alpha_pattern={"v_proj": 16},
    )
    assert [config.rank_of(LAYER.format(i, Q)) for i in (0, 1, 11)] == [2, 8, 4]
    # '_proj' stands behind no dot and names nothing.
    assert config.rank_of(LAYER.format(0, DOWN)) == 4
    assert config.scale_of(LAYER.format(1, Q)) == 1.0
    assert config.scale_of(LAYER.format(0, V)) == 4.0
    stabilised = read(use_rslora=True, rank_pattern={"q_proj": 9})
    assert stabilised.scale_of(LAYER.format(0, Q)) == pytest.approx(8 / 3)
    assert stabilised.scale_of(LAYER.format(0, V)) == 8 / math.sqrt(4)


REFUSED: list[tuple[str, object]] = [
    ("peft_type", "IA3"),
    ("use_dora", True),
    ("bias", "lora_only"),
    ("lora_bias", True),
    ("modules_to_save", ["lm_head"]),
    ("alora_invocation_tokens", [1, 2]),
    ("layer_replication", [[0, 4], [2, 5]]),
    ("target_parameters", ["mlp.experts.gate_up_proj"]),
    ("trainable_token_indices", [7]),
    ("use_qalora", True),
    ("use_bdlora", True),
    ("fan_in_fan_out", True),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_16"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "loftq"),
    ("loftq_config", {"loftq_bits": 4}),
    ("an_option_of_a_later_version", {"x": 1}),
]


@pytest.mark.parametrize(("key", "value"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_is_not_served_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"{key} is not supported") as raised:
        read(**{key: value})
    assert "at adapter_config.json" in str(raised.value)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", None])
def test_a_start_that_keeps_the_base_is_served(start: object) -> None:
    config = {} if start is None else {"init_lora_weights": start}
    assert read(**config, use_dora=False, bias="none", loftq_config={}, megatron_config=None).rank == 4


WRONG: list[tuple[str, object]] = [
    ("r", 0),
    ("r", True),
    ("r", None),
    ("lora_alpha", "8"),
    ("lora_alpha", math.inf),
    ("target_modules", None),
    ("target_modules", []),
    ("target_modules", [1]),
    ("target_modules", "(q_proj"),
    ("exclude_modules", "["),
    ("use_rslora", 1),
    ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", {"*": 4}),
    ("alpha_pattern", {"q_proj": None}),
    ("layers_to_transform", "all"),
    ("layers_to_transform", [-1]),
    ("layers_pattern", [4]),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_wrong_values_are_named(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=f"adapter config: {key}"):
        read(**{key: value})


def test_layers_beside_an_expression_are_refused() -> None:
    with pytest.raises(ModelFileError, match="layers_to_transform"):
        read(target_modules=".*q_proj", layers_to_transform=[1])
