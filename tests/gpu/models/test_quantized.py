"""Quantised models on a GPU: scores of a text beside NumPy's in float32 on the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.event import TokenLogprob
from pegainfer.runtime.cuda.driver import probe
from tests.support.quantcheckpoints import write_quantised
from tests.support.tinymodel import Tiny, token_ids, write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3, write_gguf
from tests.support.tinyrun import forced

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MODEL = Tiny("quantised", seed=61, config=SIZES)
MEAN, P99 = 0.06, 0.20  # nat, as in gate.py
FOLLOW = 8  # tokens decoded one at a time
KINDS = ("awq", "gptq_asym", "gptq_v2", "gptq_act_order", "gptq_8bit", "w4a16_asym", "w8a16", "w8a8", "nvfp4")
# Of each matrix of a layer, by a part of its GGUF name; what a Q4_K_M file has, and fallbacks of narrow rows.
MIXTURES = {
    "q4_k_m": {"attn_v": "q6_k", "ffn_down": "q6_k", "token_embd": "q6_k", "": "q4_k"},
    "q5_k_m": {"attn_v": "q6_k", "token_embd": "q8_0", "": "q5_k"},
    "fallbacks": {"ffn_down": "q5_0", "attn_v": "q5_1", "token_embd": "q8_0", "": "q4_1"},
    "q4_0": {"token_embd": "q4_0", "attn_output": "iq4_nl", "": "q4_0"},
}


@pytest.fixture(params=["packed", "expanded"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the GPU holds: these models are small, so that they would always be expanded."""
    if (reason := probe()) is not None:
        pytest.skip(reason)
    if request.param == "packed":
        keep = lambda model, groups, budget, *rest, **named: (model, budget)  # noqa: E731
        monkeypatch.setattr("pegainfer.app.gpu.quicker_form", keep)


def check(path: Path, ids: list[int], wanted: list[TokenLogprob], **engine: Any) -> None:
    """The text in one step and in a few tokens, in graphs and without."""
    for graphs, count in ((True, len(ids)), (False, len(ids)), (True, 12)):
        found, _ = forced(
            path, ids[:count], "quantised", FOLLOW, activation="auto", kv_dtype="auto", backend="cuda",
            cuda_graph=graphs, **engine,
        )  # fmt: skip
        compare(found[: count - 1], wanted[: count - 1])


def compare(found: list[TokenLogprob], wanted: list[TokenLogprob]) -> None:
    """|Δ log-probability| of the tokens that NumPy finds best."""
    errors = []
    for entry, exact in zip(found, wanted, strict=True):
        top = dict(entry.top)
        errors.append([top.get(i, entry.top[-1][1]) - value for i, value in exact.top[:8]])
    off = np.abs(errors)
    print(f"mean {off.mean():.4f} p99 {np.quantile(off, 0.99):.4f} max {off.max():.4f} nat")
    assert off.mean() <= MEAN
    assert np.quantile(off, 0.99) <= P99


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints(kind: str, tmp_path: Path) -> None:
    quantised, plain = write_quantised(MODEL, tmp_path, kind)
    ids = token_ids(MODEL)
    wanted, _ = forced(plain, ids, MODEL.name, 1, backend="reference")
    check(quantised, ids, wanted)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_quantised_while_loading(kind: str, tmp_path: Path) -> None:
    path, ids = write_checkpoint(MODEL, tmp_path / "m"), token_ids(MODEL)
    wanted, _ = forced(path, ids, MODEL.name, 1, backend="reference", quantization=kind)
    check(path, ids, wanted, quantization=kind)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_gguf(name: str, tmp_path: Path) -> None:
    model = TinyQwen3(name, seed=62, config=SIZES)
    formats = lambda tensor: next(f for part, f in MIXTURES[name].items() if part in tensor)  # noqa: E731
    path, ids = write_gguf(model, tmp_path / "m.gguf", formats), token_ids(model)
    wanted, _ = forced(path, ids, name, 1, backend="reference")
    check(path, ids, wanted)
