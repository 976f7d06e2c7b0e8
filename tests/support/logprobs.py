"""Teacher-forced log-probabilities of the engine beside those of a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.app.offline import LLM
from pegainfer.app.outputs import RequestOutput
from pegainfer.app.sampling_params import SamplingParams

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Deltas:
    """|Δ log-probability| over the reference's best tokens at every position."""

    mean: float
    p99: float
    max: float
    positions: int

    @classmethod
    def of(cls, differences: Array) -> Deltas:
        flat = np.abs(differences).reshape(-1)
        return cls(float(flat.mean()), float(np.quantile(flat, 0.99)), float(flat.max()), len(differences))


def forced(llm: LLM, ids: list[int], top: int) -> RequestOutput:
    """One prompt with log-probabilities of every token that follows another, and of one token more."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top, logprobs=top)
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    return output


def differences(output: RequestOutput, top_ids: Array, top_logprobs: Array) -> Array:
    """Ours minus the reference's: [positions, K] over the reference's K best tokens at each position.

    A token that is not among ours counts by our last one, which it cannot exceed.
    """
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    ours = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    rows = []
    for entry, ids, wanted in zip(ours, top_ids.tolist(), top_logprobs, strict=True):
        assert entry is not None
        least = min(e.logprob for e in entry.values())
        rows.append([entry[i].logprob if i in entry else least for i in ids] - wanted)
    return np.array(rows)


def perplexity_nll(llm: LLM, ids: list[int]) -> float:
    """Mean negative log-probability of each token after those before it, in nat."""
    entries = forced(llm, ids, 0).prompt_logprobs
    assert entries is not None
    given = [e[i].logprob for i, e in zip(ids[1:], entries[1:], strict=True) if e is not None]
    return -float(np.mean(given))
