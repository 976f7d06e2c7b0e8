"""The default model gives the same tokens however its work is cut: batches, chunks, prefix hits, preemption.

Bit for bit, on both activation paths, greedy and drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.offline import LLM
from pegainfer.app.sampling_params import SamplingParams
from tests.support.default_model import default_model

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
TOKENS = 40
DRAWN = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    seed=7,
    presence_penalty=0.3,
    repetition_penalty=1.1,
    max_tokens=TOKENS,
    ignore_eos=True,
)
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
PARAMS = [GREEDY if i % 2 else DRAWN for i in range(len(PROMPTS))]
# SmolLM2's layers, KV heads and head size; the exact path keeps keys and values in float32, the other in f16.
BLOCK_BYTES = {"f32": 30 * 2 * 3 * 16 * 64 * 4, "int8": 30 * 2 * 3 * 16 * 64 * 2}


def load(activation: str, **options: Any) -> LLM:
    return LLM(str(default_model()), activation=activation, max_model_len=512, **options)


def tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module", params=["f32", "int8"])
def activation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(activation: str) -> list[list[int]]:
    """Each prompt alone and in one piece, nothing cached."""
    with load(activation, prefix_cache=False, max_prefill_tokens=512, pipeline_depth=1) as llm:
        found = [tokens(llm, [p], [s])[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    assert all(len(t) == TOKENS for t in found)
    return found


def test_batched_and_pipelined(activation: str, plain: list[list[int]]) -> None:
    with load(activation, prefix_cache=False, max_prefill_tokens=512) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        assert tokens(llm, PROMPTS[::-1], PARAMS[::-1]) == plain[::-1]


@pytest.mark.parametrize("chunk", [1, 17, 64])
def test_chunked(activation: str, plain: list[list[int]], chunk: int) -> None:
    """Single-token chunks only for the short prompts: they cost a step each."""
    chosen = [i for i, p in enumerate(PROMPTS) if chunk > 1 or len(p) < 40]
    with load(activation, prefix_cache=False, max_prefill_tokens=chunk) as llm:
        got = tokens(llm, [PROMPTS[i] for i in chosen], [PARAMS[i] for i in chosen])
    assert got == [plain[i] for i in chosen]


def test_prefix_hits(activation: str, plain: list[list[int]]) -> None:
    """The second time, each full block but the last token's comes from the cache."""
    with load(activation, max_prefill_tokens=512) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        again = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == plain
    assert [o.num_cached_tokens for o in again] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]


def test_preempted(activation: str, plain: list[list[int]]) -> None:
    """Room for one long sequence and little more: sequences give way to each other and are computed anew."""
    with load(activation, kv_cache_memory=36 * BLOCK_BYTES[activation], max_num_seqs=8) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
        assert llm.stats().preemptions > 0


def test_one_thread(activation: str, plain: list[list[int]]) -> None:
    with load(activation, prefix_cache=False, threads=1) as llm:
        assert tokens(llm, PROMPTS, PARAMS) == plain
