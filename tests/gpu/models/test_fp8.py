"""A small model with FP8 weights on a GPU beside float32 of what its codes mean, in every cut of a text.

The bound is the error of the same values served as bf16 weights, whose activations are rounded alike; so it
does not depend on how far this seeded model carries a rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.event import TokenLogprob
from pegainfer.engine.config import SchedulerConfig
from pegainfer.runtime.cuda.driver import probe
from tests.gpu.forced import Scores, Texts
from tests.support.packers import KINDS, fp8
from tests.support.quantcheckpoints import write_quantised
from tests.support.tinymodel import Tiny, token_ids, write_checkpoint
from tests.support.tinyrun import forced

Array = np.ndarray[Any, Any]
MODEL = Tiny(
    "fp8", seed=41, dtype="bf16",
    config={"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
)  # fmt: skip
TILES = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
# Mean errors in nat beside those of bf16 weights. With more than 32 tokens a step activations are E4M3.
FACTOR, MARGIN, MARGIN_BOTH = 1.25, 0.01, 0.25


@pytest.fixture(autouse=True)
def gpu() -> None:
    if (reason := probe()) is not None:
        pytest.skip(reason)


def scored(folder: Path, ids: Array) -> dict[str, Scores]:
    """A text of 150 tokens and its beginnings in several cuts, replayed from graphs."""
    config = EngineConfig(backend="cuda", max_model_len=256, kv_cache_memory=1 << 26)
    runner = build_engine(folder, MODEL.name, config, SchedulerConfig(max_slots=8)).runner
    try:
        texts = Texts(runner)
        return {
            "whole": texts.score(ids, 2048),
            "chunked": texts.score(ids, 29),
            "token by token": texts.score(ids, 1),
            "batched": texts.together([ids[:40], ids, ids[:9]], 10)[1],
        }
    finally:
        runner.close()


def distance(scores: Scores, wanted: list[TokenLogprob]) -> float:
    """Mean difference of the best eight tokens' log-probabilities."""
    ids = np.array([[i for i, _ in entry.top[:8]] for entry in wanted[: len(scores.ids)]])
    exact = np.array([[p for _, p in entry.top[:8]] for entry in wanted[: len(scores.ids)]])
    return float(np.abs(scores.of(ids) - exact).mean())


@pytest.mark.parametrize("kind", ["ct_fp8_row", "tiles"])
def test_checkpoints_in_every_cut(kind: str, tmp_path: Path) -> None:
    if kind == "tiles":
        folder, plain = write_quantised(
            MODEL, tmp_path, "fp8_block", config=TILES,
            pack=lambda w: fp8(w, 128, 128, ".weight_scale_inv", bf16=True),
        )  # fmt: skip
    else:
        folder, plain = write_quantised(MODEL, tmp_path, kind, config=KINDS[kind].config)
    check(folder, plain)


def test_quantised_while_loading(tmp_path: Path) -> None:
    folder = write_checkpoint(MODEL, tmp_path)
    ids = token_ids(MODEL)[:24]
    wanted, _ = forced(folder, ids, MODEL.name, 1, backend="reference", quantization="fp8")
    found, _ = forced(
        folder, ids, MODEL.name, 1, activation="auto", kv_dtype="auto", backend="cuda", quantization="fp8"
    )
    exact, _ = forced(folder, ids, MODEL.name, 1, backend="reference")
    plain, _ = forced(folder, ids, MODEL.name, 1, activation="auto", kv_dtype="auto", backend="cuda")
    ours, theirs = error(found, wanted), error(plain, exact)
    print(f"fp8 {ours:.4f}, bf16 {theirs:.4f} nat")
    assert ours <= FACTOR * theirs + MARGIN


def error(found: list[TokenLogprob], wanted: list[TokenLogprob]) -> float:
    """As `distance`, of a text in one step."""
    errors = [
        [dict(entry.top).get(i, entry.top[-1][1]) - p for i, p in best.top[:8]]
        for entry, best in zip(found, wanted, strict=True)
    ]
    return float(np.abs(errors).mean())


def check(folder: Path, plain: Path) -> None:
    ids = np.array(token_ids(MODEL)[:150], np.int32)
    wanted, _ = forced(plain, ids.tolist(), MODEL.name, 1, backend="reference")
    ours, theirs = (
        {cut: distance(scores, wanted) for cut, scores in scored(path, ids).items()}
        for path in (folder, plain)
    )
    print({cut: (round(d, 4), round(theirs[cut], 4)) for cut, d in ours.items()})
    assert ours["whole"] <= theirs["whole"] + MARGIN_BOTH
    for cut in ours.keys() - {"whole"}:
        assert ours[cut] <= FACTOR * theirs[cut] + MARGIN, cut
