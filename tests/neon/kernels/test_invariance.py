"""As tests/cpu/kernels/test_invariance.py, on 64-bit Arm: equal bits however the work is cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pegainfer.lower.cpu.backend import CpuOptions
from tests.cpu.kernels.harness import FORMATS
from tests.cpu.kernels.model import CONFIG, LARGEST, Array, Span, cache, formats_of, program, stage, weights
from tests.cpu.kernels.test_invariance import LENGTHS, alone, in_chunks, sequences
from tests.support.replay.client import Replay

VARIANTS = [("int8", FORMATS, "f32"), ("f32", FORMATS, "f32"), ("int8", ("q4_1", "q8_0"), "f16"),
            ("int8", ("q4_1", "q8_0"), "f8_e4m3")]  # fmt: skip


class ReplayedModel:
    """The seeded model of tests/cpu/kernels/model.py; its cache stays here between steps."""

    def __init__(self, replay: Replay, options: CpuOptions, matrices: Sequence[str], kv_dtype: str) -> None:
        formats = formats_of(CONFIG, matrices)
        self.replay, self.options = replay, options
        self.weights = weights(CONFIG, formats)
        self.program = program(CONFIG, formats, kv_dtype)
        self.states = {"kv": cache(CONFIG, kv_dtype)}

    def logits(self, spans: Sequence[Span]) -> Array:
        """[tokens, V], in the spans' order."""
        inputs, env = stage(spans)
        return self.replay.run(self.options, self.program, self.weights, self.states, inputs, env, LARGEST)[
            "logits"
        ]


@pytest.mark.parametrize(("activation", "formats", "kv_dtype"), VARIANTS)
def test_any_batch_chunk_and_thread_count(
    activation: str, formats: tuple[str, ...], kv_dtype: str, replay: Replay
) -> None:
    rng = np.random.default_rng(11)

    def model(threads: int) -> ReplayedModel:
        options = CpuOptions(threads, "neon", activation)  # type: ignore[arg-type]
        return ReplayedModel(replay, options, formats, kv_dtype)

    given = sequences(rng)
    plain = model(1)
    want = [alone(plain, *s) for s in given]  # type: ignore[arg-type]
    assert all(np.isfinite(w).all() for w in want)
    together = model(3).logits([Span(ids, blocks, 0, len(ids)) for ids, blocks in given])
    for w, got in zip(want, np.split(together, np.cumsum(LENGTHS)[:-1]), strict=True):
        assert got.tobytes() == w.tobytes()
    cut = model(2)
    for (ids, _), (_, blocks), w in zip(given, sequences(rng), want, strict=True):
        sizes = iter(rng.integers(1, 50, 400).tolist())
        assert in_chunks(cut, ids, blocks, sizes).tobytes() == w.tobytes()  # type: ignore[arg-type]
