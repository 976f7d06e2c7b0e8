"""A GGUF file of Q4_K and Q6_K weights as converters mix them: NumPy against the kernels, end to end."""

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


def mixed(name: str) -> str:
    """Q6_K where quality asks for it, as in files called Q4_K_M."""
    return "q6_k" if name.startswith("token_embd") or "ffn_down" in name or "attn_v" in name else "q4_k"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(MODEL, tmp_path_factory.mktemp("k") / "k.gguf", mixed)


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
