"""Random traffic on a small Qwen3.5 gives each request the tokens that it has alone, bit for bit.

Prefix hits on pages and states, forks, preemption, chunked prefill and repeated steps all occur.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.hybrid_traffic import check_coverage, memory_of, run
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3_5 import GGUF_MODELS, MODELS, write_gguf
from tests.support.tinyqwen3_5moe import GGUF_MODELS as GGUF_MOE
from tests.support.tinyqwen3_5moe import MODELS as MOE
from tests.support.tinyqwen3_5moe import write_gguf as write_gguf_moe
from tests.support.tinyrun import available

STEPS = int(os.environ.get("PEGAINFER_HYBRID_STEPS", "600"))
MOE_STEPS = int(os.environ.get("PEGAINFER_HYBRID_STEPS", "300"))


@pytest.mark.parametrize("isa", available())
def test_random_traffic_gives_the_tokens_of_each_request_alone(isa: str, tmp_path: Path) -> None:
    folder = write_checkpoint(MODELS["published_bf16"], tmp_path)
    check_coverage(
        run(folder, STEPS, backend="cpu", isa=isa, activation="f32", kv_dtype="f32", **memory_of(folder))
    )


def test_random_traffic_on_a_quantised_file(tmp_path: Path) -> None:
    """With activations in 8 bits, keys and values in f16, and value heads in GGUF's order."""
    model, formats = GGUF_MODELS["gguf_q4_1_untied"]
    path = write_gguf(model, tmp_path / "m.gguf", formats)
    check_coverage(
        run(path, STEPS, backend="cpu", activation="int8", kv_dtype="f16", **memory_of(path, kv_dtype="f16"))
    )


def test_random_traffic_on_experts(tmp_path: Path) -> None:
    """Which experts a token goes to, and what they give, does not depend on its batch."""
    folder = write_checkpoint(MOE["moe_published_bf16"], tmp_path)
    check_coverage(
        run(folder, MOE_STEPS, backend="cpu", activation="f32", kv_dtype="f32", **memory_of(folder))
    )


def test_random_traffic_on_quantised_experts(tmp_path: Path) -> None:
    model, formats, fused = GGUF_MOE["moe_gguf_q4_1_fused"]
    path = write_gguf_moe(model, tmp_path / "m.gguf", formats, fused=fused)
    memory = memory_of(path, kv_dtype="f16")
    check_coverage(run(path, MOE_STEPS, backend="cpu", activation="int8", kv_dtype="f16", **memory))
