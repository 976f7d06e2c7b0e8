"""What states in bf16 cost: scores of the seeded models' texts against transformers in float32.

One token a step is the worst case, since each step rounds the states. The measured errors are in the line's
NOTES.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.bounds import model_groups
from pegainfer.app.config import EngineConfig
from pegainfer.app.load import open_model
from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device.layout import StateLayout, block_bytes
from tests.support.hybrid_traffic import check_coverage, memory_of, run
from tests.support.tinymodel import MODELS as LLAMAS
from tests.support.tinymodel import token_ids, write_checkpoint
from tests.support.tinyqwen3_5 import MODELS
from tests.support.tinyrun import forced, score_errors

GOLDEN = Path(__file__).parents[3] / "data" / "qwen3_5" / "tiny.npz"
NAMES = ("published_bf16", "true_heads_bf16", "text_only_f32_shards")
BACKENDS = ("cpu", "reference")
# Nat. Measured on the CPU: means of 0.0021 to 0.0043, 0.152 at most, texts' mean scores off by 0.0003.
MEAN, MOST, TEXT = 0.01, 0.3, 0.001
LEAST = 5e-4  # mean of the wanted scores' errors below which nothing was rounded
STEPS = 300
TIE = 0.25  # nat between an answer's token and another one that rounding may make better


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_with_states_in_bf16(name: str, backend: str, tmp_path: Path) -> None:
    golden = np.load(GOLDEN)
    folder, ids = write_checkpoint(MODELS[name], tmp_path), token_ids(MODELS[name])
    wanted = golden[f"{name}.greedy"].tolist()
    exact, _ = forced(folder, ids, name, 1, backend=backend)
    entries, greedy = forced(folder, ids, name, len(wanted), backend=backend, state_dtype="bf16", chunk=1)
    errors = score_errors(entries, golden[f"{name}.top_ids"], golden[f"{name}.top_logprobs"])
    text, plain = (-np.mean([e.logprob for e in found[:-1]]) for found in (entries, exact))
    print(f"{name}: mean {errors.mean():.4f}, most {errors.max():.3f} nat; text {text:.4f} for {plain:.4f}")
    assert LEAST < errors.mean() <= MEAN
    assert errors.max() <= MOST
    assert abs(text - plain) <= TEXT
    assert greedy == wanted


def test_states_take_half_the_bytes(tmp_path: Path) -> None:
    folder = write_checkpoint(MODELS["true_heads_bf16"], tmp_path)
    config = EngineConfig(backend="cpu", activation="f32", state_dtype="bf16")
    with open_model(folder) as (model, _):
        (states,) = (g for g in model_groups(model, config) if isinstance(g, StateLayout))
        conv, delta = states.parts
    assert (conv.dtype, delta.dtype) == ("f32", "bf16")
    assert block_bytes(states) == conv.nbytes + 3 * 2 * 128 * 128 * 2  # 3 linear layers of 2 heads


def test_random_traffic_with_states_in_bf16(tmp_path: Path) -> None:
    """A prefix hit goes on from a rounded state, so answers may part where two tokens are nearly as good."""
    folder = write_checkpoint(MODELS["published_bf16"], tmp_path)
    options = {"backend": "cpu", "activation": "f32", "kv_dtype": "f32", "state_dtype": "bf16"}
    seen = run(folder, STEPS, tie=TIE, **options, **memory_of(folder, state_dtype="bf16"))
    check_coverage(seen)


def test_a_model_without_states_refuses_the_option(tmp_path: Path) -> None:
    folder = write_checkpoint(next(iter(LLAMAS.values())), tmp_path)
    with pytest.raises(ConfigError, match=r"no recurrent states; expected f32; got bf16; .*state_dtype"):
        forced(folder, [1, 2, 3], "llama", 1, backend="cpu", state_dtype="bf16")
