"""LoRA adapters of lines without golden values of PEFT: equal to the base with the deltas in its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.load import open_model
from pegainfer.contract.errors import UnsupportedError
from pegainfer.ops.adapters import base_modules
from pegainfer.runtime.weights.adapter import read_adapter
from tests.support.tinylora import PREFIX, TinyAdapter, write_adapter
from tests.support.tinymodel import Array, Tiny, write_checkpoint
from tests.support.tinyqwen3_5 import TextOnly, TinyQwen3_5
from tests.support.tinyqwen3moe import TinyQwen3Moe
from tests.support.tinyrun import forced

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = ("gate_proj", "up_proj", "down_proj")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
RANK, SCALE = 4, 2.0  # r, alpha / r
MAX = 2e-3  # nat: float32 against float32, in another order of sums

# Model, and the last parts of the names of the modules that are adapted.
LINES: dict[str, tuple[Tiny, tuple[str, ...]]] = {
    "qwen3_moe": (TinyQwen3Moe("lora", seed=81), (*ATTENTION, "embed_tokens")),
    "qwen3_moe_one_dense": (
        TinyQwen3Moe("lora", seed=82, config={"mlp_only_layers": [0], "tie_word_embeddings": False}),
        (*ATTENTION, "lm_head"),
    ),
    "qwen3_5": (TinyQwen3_5("lora", seed=83), (*ATTENTION, *DENSE, *LINEAR)),
    "qwen3_5_text_only": (TextOnly("lora", seed=84), (*ATTENTION, *LINEAR, "embed_tokens")),
}  # fmt: skip


def adapter_of(parts: tuple[str, ...]) -> TinyAdapter:
    def rank(module: str) -> int | None:
        served = module.rpartition(".")[2] in parts and ".visual." not in module and "mtp." not in module
        return RANK if served else None

    return TinyAdapter("lora", 91, {"target_modules": [*parts], "r": RANK, "lora_alpha": SCALE * RANK}, rank)


def merged(model: Tiny, adapter: TinyAdapter) -> dict[str, Array]:
    """The base's tensors with the adapter's products added."""
    values, factors = model.tensors(), adapter.tensors(model)
    for name in values:
        module = PREFIX + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in factors:
            delta = factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
        elif f"{module}.lora_embedding_A" in factors:
            delta = (factors[f"{module}.lora_embedding_B"] @ factors[f"{module}.lora_embedding_A"]).T
        else:
            continue
        values[name] = (values[name] + SCALE * delta).astype(np.float32)
    return values


def text(model: Tiny) -> list[int]:
    return np.random.RandomState(model.seed).randint(0, 160, 60).tolist()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("line", LINES)
def test_an_adapter_is_the_base_with_its_deltas(line: str, backend: str, tmp_path: Path) -> None:
    model, parts = LINES[line]
    if "embed_tokens" in parts and model.hf_config()["tie_word_embeddings"]:
        # Merging would change the head as well, so the two are stored apart.
        config = {**model.config, "tie_word_embeddings": False}
        model = type(model)(model.name, seed=model.seed, config=config)
    adapter = adapter_of(parts)
    base = write_checkpoint(model, tmp_path / "base")
    other = write_checkpoint(model, tmp_path / "merged", merged(model, adapter))
    folder = write_adapter(adapter, model, tmp_path / "adapter")
    ids = text(model)
    plain = [e.logprob for e in forced(base, ids, line, 1, backend=backend, isa=None)[0]]
    got, tokens = forced(base, ids, line, 6, backend=backend, isa=None, adapter=folder)
    want, wanted = forced(other, ids, line, 6, backend=backend, isa=None)
    errors = [abs(g.logprob - w.logprob) for g, w in zip(got, want, strict=True)]
    assert max(errors) < MAX and tokens == wanted
    assert max(abs(g.logprob - p) for g, p in zip(got, plain, strict=True)) > 100 * MAX


def test_factors_of_experts_and_routers_are_refused_by_name(tmp_path: Path) -> None:
    model, _ = LINES["qwen3_moe"]
    base = write_checkpoint(model, tmp_path / "base")
    for part, module in (("gate", "mlp.gate"), ("up_proj", "mlp.experts.0.up_proj")):
        folder = write_adapter(adapter_of(("q_proj", part)), model, tmp_path / part)
        with open_model(base) as (opened, _), pytest.raises(UnsupportedError, match=module):
            read_adapter(folder, base_modules(opened.adapted()), 16)  # type: ignore[attr-defined]
