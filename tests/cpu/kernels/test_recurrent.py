"""The recurrent ops on the CPU: the same bits for any batch, chunks and threads; errors come first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.lower.cpu.backend import CpuBackend, CpuOptions
from pegainfer.lower.cpu.executor import CpuExecutor
from pegainfer.ops.delta import CAUSAL_CONV_SILU, GATED_DELTA_RULE
from pegainfer.ops.program import Builder, Program
from tests.cpu.kernels.harness import ISAS

Array = np.ndarray[Any, Any]
LAYERS, POOL, TAPS, EPS = 2, 7, 4, 1e-6
KEYS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 32, 48
CHANNELS = 2 * KEYS * KEY_DIM + HEADS * VALUE_DIM
LENGTHS = (90, 37, 5)
SAVED = {(0, 33): 4, (0, 64): 5, (1, 16): 6}  # (row, tokens) -> the entry that the state is saved to


def program(state_dtype: str = "f32", value_dim: int = VALUE_DIM) -> Program:
    """Convolution and delta rule, one after the other, of both layers."""
    b = Builder("recurrent")
    channels = 2 * KEYS * KEY_DIM + HEADS * value_dim
    conv = b.state("conv", POOL, LAYERS, TAPS - 1, channels, dtype=state_dtype)
    delta = b.state("delta", POOL, LAYERS, HEADS, KEY_DIM, value_dim, dtype="f32")
    x = b.input("x", "T", channels, dtype="f32")
    gates = {n: b.input(n, "T", HEADS, dtype="f32") for n in "ab"}
    taps = b.input("taps", TAPS, channels, dtype="f32")
    heads = {n: b.input(n, HEADS, dtype="f32") for n in ("a_log", "dt_bias")}
    rows = {n: b.input(n, "R") for n in ("state_ids", "query_starts", "query_lens", "context_lens")}
    rows["state_saves"] = b.input("state_saves", "T")
    for layer in range(LAYERS):
        mixed = b.buffer(f"mixed.{layer}", "T", channels)
        out = b.output(f"out.{layer}", "T", HEADS, value_dim)
        b.emit(CAUSAL_CONV_SILU, {"layer": layer}, out=mixed, conv=conv, x=x, taps=taps, **rows)
        b.emit(
            GATED_DELTA_RULE, {"layer": layer, "eps": EPS}, out=out, delta=delta, qkv=mixed, **gates, **heads,
            **rows,
        )  # fmt: skip
    return b.build()


class Model:
    """Sequences of fixed random inputs over a pool of states; row r keeps its state in entry r."""

    def __init__(self, options: CpuOptions) -> None:
        self.backend = CpuBackend({}, options)
        self.states = {
            "conv": np.full((POOL, LAYERS, TAPS - 1, CHANNELS), np.nan, np.float32),
            "delta": np.full((POOL, LAYERS, HEADS, KEY_DIM, VALUE_DIM), np.nan, np.float32),
        }
        self.executor: CpuExecutor = self.backend.prepare(program(), self.states, {"T": 200, "R": 3})
        rng = np.random.default_rng(5)
        self.inputs = {
            "x": [rng.standard_normal((n, CHANNELS), np.float32) for n in LENGTHS],
            "a": [rng.standard_normal((n, HEADS), np.float32) for n in LENGTHS],
            "b": [rng.standard_normal((n, HEADS), np.float32) for n in LENGTHS],
        }
        self.fixed = {
            "taps": rng.standard_normal((TAPS, CHANNELS), np.float32),
            "a_log": rng.standard_normal(HEADS, np.float32),
            "dt_bias": rng.standard_normal(HEADS, np.float32),
        }

    def stage(self, spans: list[tuple[int, int, int]], ids: dict[int, int]) -> tuple[dict[str, Array], Any]:
        """Inputs of a step; spans are (sequence, first token, tokens)."""
        lens = np.array([count for _, _, count in spans], np.int32)
        saves = np.full(lens.sum(), -1, np.int32)
        starts = (np.cumsum(lens) - lens).astype(np.int32)
        for (row, tokens), entry in SAVED.items():
            for start, (r, first, count) in zip(starts, spans, strict=True):
                if r == row and first < tokens <= first + count:
                    saves[start + tokens - first - 1] = entry
        given = {
            n: np.concatenate([each[r][first : first + count] for r, first, count in spans])
            for n, each in self.inputs.items()
        }
        rows = {
            "state_ids": np.array([ids.get(r, r) for r, _, _ in spans], np.int32), "state_saves": saves,
            "query_starts": starts, "query_lens": lens,
            "context_lens": np.array([first + count for _, first, count in spans], np.int32),
        }  # fmt: skip
        return given | rows | self.fixed, {"T": int(lens.sum()), "R": len(spans)}

    def run(self, spans: list[tuple[int, int, int]], ids: dict[int, int] | None = None) -> list[Array]:
        """Outputs [tokens, layers, H, V] of each span."""
        outputs = self.executor.run(*self.stage(spans, ids or {}))
        both = np.stack([outputs[f"out.{layer}"] for layer in range(LAYERS)], axis=1)
        return np.split(both, np.cumsum([count for _, _, count in spans])[:-1])


def whole(options: CpuOptions) -> tuple[list[Array], dict[str, Array]]:
    model = Model(options)
    outputs = model.run([(r, 0, n) for r, n in enumerate(LENGTHS)])
    return outputs, model.states


@pytest.mark.parametrize("isa", ISAS)
def test_any_batch_chunk_and_thread_count(isa: str) -> None:
    want, states = whole(CpuOptions(threads=1, isa=isa))
    assert all(np.isfinite(w).all() for w in want)
    rng = np.random.default_rng(9)
    for threads in (1, 3):
        model, at = Model(CpuOptions(threads=threads, isa=isa)), [0] * len(LENGTHS)
        got: list[list[Array]] = [[] for _ in LENGTHS]
        while waiting := [r for r, n in enumerate(LENGTHS) if at[r] < n]:
            rows = rng.permutation(waiting)[: rng.integers(1, 4)]
            spans = [
                (int(r), at[r], min(int(rng.choice((1, 1, 2, 7, 30))), LENGTHS[r] - at[r])) for r in rows
            ]
            for (r, first, count), part in zip(spans, model.run(spans), strict=True):
                got[r].append(part)
                at[r] = first + count
        for r, parts in enumerate(got):
            assert np.concatenate(parts).tobytes() == want[r].tobytes()
        assert all(model.states[k].tobytes() == s.tobytes() for k, s in states.items())


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_goes_on_from_a_saved_state_with_the_same_bits(isa: str) -> None:
    want, _ = whole(CpuOptions(threads=2, isa=isa))
    model = Model(CpuOptions(threads=2, isa=isa))
    model.run([(0, 0, 80)])
    assert np.isfinite(model.states["delta"][[4, 5]]).all() and np.isnan(model.states["delta"][6]).all()
    (got,) = model.run([(0, 64, LENGTHS[0] - 64)], {0: 5})
    assert got.tobytes() == want[0][64:].tobytes()


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("state_ids", 0, POOL, r"state_ids\[0\]: expected -1 to 6, got 7"),
        ("state_ids", 1, 0, r"state_ids\[1\]: state 0 is written twice in one step"),
        ("state_saves", 3, 1, r"state_saves\[3\]: state 1 is written twice in one step"),
        ("state_saves", 0, POOL, r"state_saves\[0\]: expected -1 to 6, got 7"),
        ("query_starts", 1, 90, r"query_starts\[1\]: expected within 10, got 5 entries from 90"),
        ("query_lens", 1, -1, r"query_starts\[1\]: expected within 10, got -1 entries from 5"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_runs(name: str, at: int, value: int, message: str) -> None:
    model = Model(CpuOptions(threads=2))
    inputs, env = model.stage([(0, 0, 5), (1, 0, 5)], {})
    inputs[name][at] = value
    with pytest.raises(OpError, match=message):
        model.executor.run(inputs, env)
    assert all(np.isnan(state).all() for state in model.states.values())


@pytest.mark.parametrize(
    ("state_dtype", "value_dim", "message"),
    [("f16", VALUE_DIM, "dtype of conv .* expected f32"), ("f32", 24, "multiple of 16; got 24")],
)
def test_states_that_the_kernels_cannot_walk_are_refused(
    state_dtype: str, value_dim: int, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        CpuBackend({}).prepare(program(state_dtype, value_dim), {}, {"T": 1, "R": 1})
