"""The default model's real weights on a GPU: greedy answers beside the CPU's exact path."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.app.offline import LLM
from pegainfer.app.outputs import RequestOutput
from pegainfer.app.sampling_params import SamplingParams
from pegainfer.runtime.cuda.driver import probe
from tests.support.default_model import default_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three laws of motion say that " * 40,
]
TIE = 0.35  # nat; bf16 moved a logit by up to 0.2 on these texts
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logprobs=5, ignore_eos=True)


def answers(**options: object) -> list[RequestOutput]:
    with LLM(str(default_model()), **options) as llm:
        return llm.generate(PROMPTS, GREEDY, use_tqdm=False)


@pytest.mark.gpu
def test_greedy_answers_are_the_cpu_s_or_a_tie_explains_it() -> None:
    if (reason := probe()) is not None:
        pytest.skip(reason)
    exact = answers(activation_dtype="f32", kv_cache_dtype="f32", max_model_len=1024)
    gpu = {"device": "cuda", "max_model_len": 1024, "max_num_seqs": 8, "gpu_memory_utilization": 0.2}
    got = answers(**gpu)
    parted = []
    for a, b in zip(exact, got, strict=True):
        want, ids = list(a.outputs[0].token_ids), list(b.outputs[0].token_ids)
        at = next((i for i, (w, g) in enumerate(zip(want, ids, strict=True)) if w != g), None)
        if at is not None:
            top = {i: entry.logprob for i, entry in a.outputs[0].logprobs[at].items()}
            gap = top[want[at]] - top.get(ids[at], -np.inf)
            parted.append((at, round(float(gap), 4)))
            assert gap <= TIE, (at, gap)
    print(f"{len(parted)} of {len(PROMPTS)} part, at (token, gap) {parted}")
