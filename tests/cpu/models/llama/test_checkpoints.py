"""Quantised checkpoints against float32 ones of what their levels mean: NumPy and kernels, end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import UnsupportedError
from tests.cpu.models.llama.test_superblocks import PERPLEXITY, distances, nll
from tests.support.packers import KINDS
from tests.support.quantcheckpoints import is_linear, write_quantised
from tests.support.tinydeepseek import KIMI, TinyDeepseek, WithVision
from tests.support.tinymodel import Tiny, token_ids, write_checkpoint
from tests.support.tinyqwen3moe import TinyQwen3Moe
from tests.support.tinyrun import available, forced

MODEL = Tiny("checkpoint", seed=23)
FOLLOW = 8  # greedy tokens
MEAN, MAX = 1e-3, 1e-2  # nat, float32 against float32
MEAN_16, MAX_16 = 0.06, 0.2  # where kernels have the values as float16


@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_own_values_in_float32(kind: str, tmp_path: Path) -> None:
    quantised, plain = write_quantised(MODEL, tmp_path, kind)
    ids = token_ids(MODEL)
    wanted, follows = forced(plain, ids, MODEL.name, FOLLOW, backend="reference")
    for backend, isa in (("reference", None), ("cpu", available()[0])):
        entries, greedy = forced(quantised, ids, MODEL.name, FOLLOW, backend=backend, isa=isa)
        found = distances(entries, wanted)
        narrow = KINDS[kind].form == "f16" and backend == "cpu"
        assert narrow or greedy == follows
        assert found.mean() <= (MEAN_16 if narrow else MEAN)
        assert found.max() <= (MAX_16 if narrow else MAX)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("kind", ["awq", "w8a8", "nvfp4"])
def test_rounded_activations(kind: str, isa: str, tmp_path: Path) -> None:
    quantised, plain = write_quantised(MODEL, tmp_path, kind)
    ids = token_ids(MODEL)
    wanted, _ = forced(plain, ids, MODEL.name, 1, backend="reference")
    entries, _ = forced(quantised, ids, MODEL.name, 1, backend="cpu", isa=isa, activation="int8")
    found = distances(entries, wanted)
    assert 1e-4 < found.mean() <= 0.1, "within the rounding of activations, and not without it"
    assert abs(np.expm1(nll(entries) - nll(wanted))) <= PERPLEXITY


def test_modules_may_be_stored_in_several_ways(tmp_path: Path) -> None:
    """Attention is ignored but for v, whose neighbours q and k are plain; the rest is quantised."""
    skipped = ["re:.*self_attn.(q|k|o)_proj$", "lm_head"]
    config = KINDS["w4a16_asym"].config | {"ignore": skipped}
    chosen = lambda n: is_linear(n) and not any(f"{p}_proj" in n for p in ("q", "k", "o"))  # noqa: E731
    quantised, plain = write_quantised(MODEL, tmp_path, "w4a16_asym", chosen=chosen, config=config)
    ids = token_ids(MODEL)
    wanted, follows = forced(plain, ids, MODEL.name, FOLLOW, backend="reference")
    entries, greedy = forced(quantised, ids, MODEL.name, FOLLOW, backend="cpu")
    assert greedy == follows
    assert distances(entries, wanted).max() <= MAX


# What Kimi's checkpoints leave out of their quantisation: all but the routed experts.
KIMI_IGNORE = [
    "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*mlp\.gate$", "re:vision_tower.*", "re:mm_projector.*",
]  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        TinyQwen3Moe("experts", seed=24),
        TinyDeepseek("experts", seed=25, config=KIMI),
        WithVision("experts", seed=26, config=KIMI),
    ],
    ids=["qwen3_moe", "kimi_k2", "kimi_k2.5"],
)
def test_routed_experts_in_4_bits_beside_plain_attention(model: Tiny, tmp_path: Path) -> None:
    config = KINDS["w4a16"].config | {"ignore": KIMI_IGNORE}
    quantised, plain = write_quantised(
        model, tmp_path, "w4a16", chosen=lambda n: ".experts." in n, config=config
    )
    ids = token_ids(model)
    wanted, follows = forced(plain, ids, model.name, FOLLOW, backend="reference")
    for backend in ("reference", "cpu"):
        entries, greedy = forced(quantised, ids, model.name, FOLLOW, backend=backend)
        assert greedy == follows
        assert distances(entries, wanted).max() <= MAX


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [("awq", "q_b_proj.qweight"), ("w4a16", "kv_b_proj.weight_packed")],
    ids=["rows of packed words", "matrices that are transposed"],
)
def test_values_in_another_order_cannot_be_quantised(kind: str, tensor: str, tmp_path: Path) -> None:
    quantised, _ = write_quantised(TinyDeepseek("all", seed=27, config=KIMI), tmp_path, kind)
    with pytest.raises(UnsupportedError, match=rf"{tensor}: this line keeps its values in another order"):
        forced(quantised, [1, 2], "all", 1, backend="reference")


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_quantised_while_loading(kind: str, tmp_path: Path) -> None:
    """Kernels have the levels that the reference has, and those are not the plain values."""
    path, ids = write_checkpoint(MODEL, tmp_path / "m"), token_ids(MODEL)
    plain, _ = forced(path, ids, MODEL.name, 1, backend="reference")
    wanted, follows = forced(path, ids, MODEL.name, FOLLOW, backend="reference", quantization=kind)
    entries, greedy = forced(path, ids, MODEL.name, FOLLOW, backend="cpu", quantization=kind)
    assert greedy == follows
    assert distances(entries, wanted).max() <= MAX
    assert MAX < distances(wanted, plain).mean() < 0.5
