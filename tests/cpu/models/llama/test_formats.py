"""The fast path's perplexity on the default model in the formats that its own file does not have.

`pytest -s` prints what was found.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.offline import LLM
from pegainfer.kernels.cpu.library import has_bf16
from tests.support.default_model import default_model
from tests.support.logprobs import perplexity_nll
from tests.support.requantised import requantised

GOLDEN = np.load(Path(__file__).parents[3] / "data" / "smollm2" / "golden.npz")
TOKENS = 2000  # of the perplexity text
PERPLEXITY = 0.007  # of the fast path over the exact one


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "bf16"])
def test_fast_path_keeps_the_perplexity(form: str, tmp_path: Path) -> None:
    if form == "bf16" and not has_bf16():
        pytest.skip("this processor has no products of bf16: its one path is the exact one")
    model = str(requantised(default_model(), tmp_path / f"{form}.gguf", form))
    text = GOLDEN["text.ids"].tolist()[:TOKENS]
    with LLM(model, activation_dtype="f32", max_model_len=TOKENS + 1) as exact:
        wanted = perplexity_nll(exact, text)
    with LLM(model, activation_dtype="auto", max_model_len=TOKENS + 1) as fast:
        found = perplexity_nll(fast, text)
    print(f"\n{form}: exact {np.exp(wanted):.4f}, fast {np.exp(found):.4f} ({np.expm1(found - wanted):+.2%})")
    assert found != wanted, "the fast path is not in use"
    assert np.expm1(found - wanted) <= PERPLEXITY
