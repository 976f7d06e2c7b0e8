"""The default model gives the same tokens however its work is cut: batches, chunks, prefix hits, preemption.

Bit for bit, on both activation paths, greedy and drawn.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.offline import LLM
from tests.support.default_model import default_model
from tests.support.invariance import Invariance, Workload

GOLDEN = np.load(Path(__file__).parents[3] / "data" / "smollm2" / "golden.npz")
TEXT: list[int] = GOLDEN["text.ids"].tolist()
# The chat prompts, and slices of a text whose lengths lie around multiples of a block and of a chunk.
PROMPTS: list[list[int]] = [
    *(GOLDEN[f"{i}.ids"][: int(GOLDEN[f"{i}.num_prompt"])].tolist() for i in range(6)),
    *(
        TEXT[start : start + n]
        for start, n in ((0, 1), (100, 31), (200, 32), (300, 33), (400, 255), (700, 400))
    ),
]
# Keys and values of the exact path are float32; f16 is tried with the other.
KV = {"f32": "f32", "int8": "f16"}
# SmolLM2's layers, KV heads and head size.
BLOCK_BYTES = {"f32": 30 * 2 * 3 * 16 * 64 * 4, "int8": 30 * 2 * 3 * 16 * 64 * 2}


@pytest.fixture(scope="module", params=["f32", "int8"])
def work(request: pytest.FixtureRequest) -> Workload:
    activation = str(request.param)
    load = partial(
        LLM,
        str(default_model()),
        activation_dtype=activation,
        kv_cache_dtype=KV[activation],
        max_model_len=512,
    )
    return Workload(load, PROMPTS, BLOCK_BYTES[activation], repeats=1, longest_stepwise=39)


class TestInvariance(Invariance):
    """Runs the tests that all lines share."""
