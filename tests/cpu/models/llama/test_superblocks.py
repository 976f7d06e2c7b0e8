"""GGUF files that mix formats as llama.cpp's quantiser does: NumPy against the kernels, end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.event import TokenLogprob
from tests.support.tinymodel import Tiny, token_ids, write_gguf
from tests.support.tinyrun import available, forced

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MODEL = Tiny("gguf_q4_k_q6_k", seed=15, config=WIDE)
FOLLOW = 20  # greedy tokens
PERPLEXITY = 0.007  # of the 8-bit path over the exact one


# By the name of the mix: the format of most matrices, and of those where quality asks for more bits. The
# last one is what Q4_K_M and Q5_K_M files have for rows that are no multiple of 256, as SmolLM2-135M's.
MIXES = {
    "Q4_K_M": ("q4_k", "q6_k"), "Q5_K_M": ("q5_k", "q6_k"), "narrow": ("q5_0", "q5_1"),
    "Q3_K_M": ("q3_k", "q5_k"), "Q2_K": ("q3_k", "q2_k"), "IQ4_XS": ("iq4_xs", "iq4_nl"),
    "MXFP4": ("mxfp4", "q8_0"),
}  # fmt: skip


@pytest.fixture(scope="module", params=MIXES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    most, better = MIXES[request.param]

    def mixed(name: str) -> str:
        return better if name.startswith("token_embd") or "ffn_down" in name or "attn_v" in name else most

    return write_gguf(MODEL, tmp_path_factory.mktemp("k") / f"{request.param}.gguf", mixed)


@pytest.fixture(scope="module")
def reference(path: Path) -> tuple[list[TokenLogprob], list[int]]:
    return forced(path, token_ids(MODEL), MODEL.name, FOLLOW, backend="reference")


def distances(ours: list[TokenLogprob], theirs: list[TokenLogprob], best: int = 8) -> np.ndarray:
    """|Δ log-probability| of their best tokens; one that is not among our twenty counts by our last."""
    found = []
    for a, b in zip(ours, theirs, strict=True):
        have = dict(a.top)
        found.append([have.get(i, min(have.values())) - p for i, p in b.top[:best]])
    return np.abs(found)


def nll(entries: list[TokenLogprob]) -> float:
    """Of the text: the last entry is of a token that was drawn."""
    return -float(np.mean([e.logprob for e in entries[:-1]]))


@pytest.mark.parametrize("isa", available())
def test_exact_path_equals_numpy(
    isa: str, path: Path, reference: tuple[list[TokenLogprob], list[int]]
) -> None:
    entries, greedy = forced(path, token_ids(MODEL), MODEL.name, FOLLOW, backend="cpu", isa=isa)
    found = distances(entries, reference[0])
    assert greedy == reference[1]
    assert found.mean() <= 1e-3
    assert found.max() <= 1e-2


@pytest.mark.parametrize("isa", available())
def test_int8_path(isa: str, path: Path, reference: tuple[list[TokenLogprob], list[int]]) -> None:
    entries, _ = forced(path, token_ids(MODEL), MODEL.name, 1, backend="cpu", isa=isa, activation="int8")
    found = distances(entries, reference[0])
    assert 1e-4 < found.mean() <= 0.1, "within the rounding of activations, and not without it"
    assert abs(np.expm1(nll(entries) - nll(reference[0]))) <= PERPLEXITY
