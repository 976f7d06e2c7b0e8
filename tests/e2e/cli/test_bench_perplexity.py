"""pegainfer bench perplexity: the figure is that of the engine's own log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.offline import LLM
from tests.support.default_model import default_model
from tests.support.logprobs import perplexity_nll
from tests.support.server import pega_here

TEXT = Path(__file__).parents[2] / "data" / "smollm2" / "text.txt"


def test_windows_follow_each_other(tmp_path: Path) -> None:
    model, out = default_model(), tmp_path / "out.jsonl"
    done = pega_here(
        "bench", "perplexity", str(model), "--text", str(TEXT), "--tokens", "100", "--window", "60",
        "--activation-dtype", "f32", "--output", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with LLM(str(model), activation_dtype="f32", max_model_len=128) as llm:
        ids = llm.get_tokenizer().encode(TEXT.read_text())[:100]
        means = [perplexity_nll(llm, part) for part in (ids[:60], ids[60:])]
    want = float(np.exp((59 * means[0] + 39 * means[1]) / 98))
    row = json.loads(out.read_text())
    assert (row["predicted"], row["quantization"], row["activation"]) == (98, None, "f32")
    assert row["perplexity"] == pytest.approx(want, abs=2e-4)
    assert f"perplexity {row['perplexity']:.4f}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a text is missing"),
        (["--text", "nowhere.txt"], "the text cannot be read"),
        (["--text", "nowhere.txt", "--window", "1"], "sizes of a bench"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    done = pega_here("bench", "perplexity", str(default_model()), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
