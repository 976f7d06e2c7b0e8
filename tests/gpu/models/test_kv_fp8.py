"""A KV cache of 8-bit floats on a GPU: scores of a text beside the CPU's with the same cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.runtime.cuda.driver import probe
from tests.support.tinymodel import token_ids, write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3
from tests.support.tinyqwen3_5 import MODELS as HYBRID
from tests.support.tinyrun import forced

MEAN, P99 = 0.06, 0.20  # nat, as in gate.py
TINY = {
    "dense": TinyQwen3("gpu", seed=5, dtype="bf16", config={"head_dim": 64}),
    "hybrid": HYBRID["true_heads_bf16"],
}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", TINY)
def test_scores_are_those_of_the_cpu_with_such_a_cache(name: str, graphs: bool, tmp_path: Path) -> None:
    """A prompt of 150 tokens in chunks, then decoded ones."""
    if (reason := probe()) is not None:
        pytest.skip(reason)
    model = TINY[name]
    folder, ids = write_checkpoint(model, tmp_path), token_ids(model)[:150]
    run = {"follow": 8, "kv_dtype": "fp8"}
    want, _ = forced(folder, ids, model.name, backend="cpu", activation="f32", **run)
    got, _ = forced(folder, ids, model.name, backend="cuda", activation="auto", cuda_graph=graphs, **run)
    errors = []
    for ours, theirs in zip(got, want, strict=True):
        top = dict(ours.top)
        errors += [top.get(i, ours.top[-1][1]) - p for i, p in theirs.top[:8]]
    found = np.abs(errors)
    print(f"mean {found.mean():.4f} p99 {np.quantile(found, 0.99):.4f} max {found.max():.4f} nat")
    assert found.mean() <= MEAN
    assert np.quantile(found, 0.99) <= P99
