"""A tiny Qwen3 gives the same tokens however its work is cut: batches, chunks, prefix hits, preemption.

Bit for bit: from safetensors in float32 arithmetic, and from 8-bit GGUF with activations in 8 bits.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pegainfer.app.offline import LLM
from tests.support.invariance import Invariance, Workload
from tests.support.qwentext import SMALL
from tests.support.servedqwen3 import write_served_folder, write_served_gguf
from tests.support.tinyqwen3 import HEAD_DIM, KV_HEADS

# Lengths around multiples of a block and of a chunk.
LENGTHS = (1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 255, 400)
PROMPTS = [np.random.RandomState(100 + i).randint(0, SMALL - 3, n).tolist() for i, n in enumerate(LENGTHS)]
# Keys and values of the exact path are float32; f16 is tried with the other.
KV = {"f32": "f32", "int8": "f16"}
# Two layers.
BLOCK_BYTES = {"f32": 2 * 2 * KV_HEADS * 16 * HEAD_DIM * 4, "int8": 2 * 2 * KV_HEADS * 16 * HEAD_DIM * 2}


@pytest.fixture(scope="module", params=["folder-f32", "gguf-int8"])
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    kind, activation = str(request.param).split("-")
    folder = tmp_path_factory.mktemp("qwen3")
    path = write_served_folder(folder) if kind == "folder" else write_served_gguf(folder / "m.gguf")
    load = partial(LLM, str(path), activation_dtype=activation, kv_cache_dtype=KV[activation])
    return Workload(load, PROMPTS, BLOCK_BYTES[activation])


class TestInvariance(Invariance):
    """Runs the tests that all lines share."""
