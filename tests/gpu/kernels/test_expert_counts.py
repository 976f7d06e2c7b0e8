"""Tokens of experts: the kernel beside NumPy, and a model's counts beside those of the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runtime.cuda.launch import Launch, i32, ptr
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.cpu.app.test_expert_stats import DECODED, PROMPTS, counts, served
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3moe import MODELS

DIFFER = 0.02  # share of a layer's choices that may differ: rounding to bf16 decides between close scores


@pytest.mark.parametrize(("tokens", "k", "n"), [(1, 1, 1), (5, 8, 128), (700, 8, 256), (33, 3, 8192)])
def test_choices_are_added_to_totals(tokens: int, k: int, n: int, ctx: CudaContext) -> None:
    """Counts the first `tokens` tokens of each layer; numbers that are no expert's are left out."""
    rng, layers = np.random.default_rng(tokens), 3
    choices = rng.integers(-1, n + 1, (layers, tokens + 2, k)).astype(np.int32)
    before = rng.integers(0, 1 << 40, (layers, n))
    held = [DeviceTensor.from_numpy(c, "i32", ctx.stream) for c in choices]
    table = DeviceTensor.from_numpy(np.array([t.address for t in held], np.uint64), "u64", ctx.stream)
    totals = DeviceTensor.from_numpy(before, "i64", ctx.stream)
    args = [ptr(totals.address), ptr(table.address), i32(tokens), i32(k), i32(n)]
    launch = Launch(ctx.library.kernel("count_experts"), (layers, 1, 1), 256, args, shared=4 * n)
    for _ in range(2):
        launch(ctx.stream)
    counted = choices[:, :tokens]
    want = np.stack([np.bincount(c[(c >= 0) & (c < n)], minlength=n) for c in counted.reshape(layers, -1)])
    np.testing.assert_array_equal(totals.numpy(ctx.stream), before + 2 * want)


@pytest.mark.parametrize("prefill", [128, 16])
def test_a_models_counts_are_those_of_the_reference(prefill: int, ctx: CudaContext, tmp_path: Path) -> None:
    model = MODELS["true_heads_bf16"]
    folder, chosen = write_checkpoint(model, tmp_path), model.hf_config()["num_experts_per_tok"]
    found = [
        served(folder, backend, prefill=prefill, activation=activation)
        for backend, activation in (("cuda", "auto"), ("reference", "f32"))
    ]
    got, want = (counts(experts) for experts in found if experts is not None)
    computed = sum(len(p) + DECODED - 1 for p in PROMPTS)
    assert (got.sum(axis=1) == chosen * computed).all()
    assert (np.abs(got - want).sum(axis=1) <= 2 * DIFFER * chosen * computed).all()
