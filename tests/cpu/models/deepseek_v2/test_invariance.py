"""A tiny DeepSeek gives the same tokens however its work is cut: batches, chunks, prefix hits, preemption.

Bit for bit: from safetensors in float32 arithmetic, and from 8-bit GGUF with activations in 8 bits and a
cache in float16.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pegainfer.app.offline import LLM
from tests.support.deepseekgguf import write_gguf
from tests.support.invariance import Invariance, Workload
from tests.support.qwentext import SMALL, small_metadata, write_text
from tests.support.tinydeepseek import V2, V3, TinyDeepseek
from tests.support.tinymodel import by_role, write_checkpoint
from tests.support.tinyqwen3moe import with_router

# Lengths around multiples of a block, of a chunk, and of the tokens that one pass over a matrix serves.
LENGTHS = (1, 5, 15, 16, 17, 33, 63, 64, 65, 190, 400)
PROMPTS = [np.random.RandomState(300 + i).randint(0, SMALL - 3, n).tolist() for i, n in enumerate(LENGTHS)]
SIZES = {"vocab_size": 512, "num_hidden_layers": 2}
LITE = TinyDeepseek("lite", seed=121, dtype="bf16", config=V2 | SIZES)
V3_LIKE = TinyDeepseek("v3", seed=122, config=V3 | SIZES)
KV = {"f32": ("f32", 4), "int8": ("f16", 2)}


@pytest.fixture(scope="module", params=["folder-f32", "gguf-int8"])
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    kind, activation = str(request.param).split("-")
    folder = tmp_path_factory.mktemp("deepseek_v2")
    if kind == "folder":
        path = write_text(write_checkpoint(LITE, folder))
    else:
        formats = with_router(by_role("q8_0", "q8_0", "q8_0"))
        path = write_gguf(V3_LIKE, folder / "m.gguf", formats, split=True, text=small_metadata())
    kv, item = KV[activation]
    load = partial(LLM, str(path), activation_dtype=activation, kv_cache_dtype=kv)
    return Workload(load, PROMPTS, 2 * 16 * (32 + 8) * item)  # layers, tokens, latent and rotated key


class TestInvariance(Invariance):
    """Runs the tests that all lines share."""
