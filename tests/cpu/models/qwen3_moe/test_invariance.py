"""A tiny Qwen3-MoE gives the same tokens however its work is cut: batches, chunks, prefix hits, preemption.

Bit for bit: from safetensors in float32 arithmetic, and from 8-bit GGUF with activations in 8 bits.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pegainfer.app.offline import LLM
from tests.support.invariance import Invariance, Workload
from tests.support.qwentext import SMALL, small_metadata, write_text
from tests.support.tinymodel import by_role, write_checkpoint
from tests.support.tinyqwen3 import HEAD_DIM, KV_HEADS
from tests.support.tinyqwen3moe import TinyQwen3Moe, with_router, write_gguf

# Lengths around multiples of a block, of a chunk, and of the tokens that one pass over an expert serves.
LENGTHS = (1, 5, 15, 16, 17, 33, 63, 64, 65, 190, 400)
PROMPTS = [np.random.RandomState(200 + i).randint(0, SMALL - 3, n).tolist() for i, n in enumerate(LENGTHS)]
KV = {"f32": "f32", "int8": "f16"}
BLOCK_BYTES = {"f32": 2 * 2 * KV_HEADS * 16 * HEAD_DIM * 4, "int8": 2 * 2 * KV_HEADS * 16 * HEAD_DIM * 2}
SERVED = TinyQwen3Moe(
    "served", seed=81, dtype="bf16", config={"vocab_size": 512, "max_position_embeddings": 512}
)


@pytest.fixture(scope="module", params=["folder-f32", "gguf-int8"])
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    kind, activation = str(request.param).split("-")
    folder = tmp_path_factory.mktemp("qwen3_moe")
    if kind == "folder":
        path = write_text(write_checkpoint(SERVED, folder))
    else:
        formats = with_router(by_role("q8_0", "q8_0", "q8_0"))
        path = write_gguf(SERVED, folder / "m.gguf", formats, small_metadata())
    load = partial(LLM, str(path), activation_dtype=activation, kv_cache_dtype=KV[activation])
    return Workload(load, PROMPTS, BLOCK_BYTES[activation])


class TestInvariance(Invariance):
    """Runs the tests that all lines share."""
