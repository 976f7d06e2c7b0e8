"""Linear attention on the GPU with as many rows as real batches have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.delta import RING_HEADS
from pegainfer.ops.compose import one_call
from pegainfer.ops.delta import STATES
from pegainfer.ops.gated_delta import GATED_DELTA
from pegainfer.ops.rounding import row_errors
from pegainfer.ops.tensor import Kind
from tests.gpu.harness import raw, run_once

Array = np.ndarray[Any, Any]
HIDDEN, KEY_HEADS, HEADS, DIM, TAPS = 64, 4, 8, 128, 4
ERROR = 0.01  # of a row's norm; a rounding of the projection to bf16 is 0.004
SIXTEEN = ("out", "x", "conv", "w_qkv", "w_z", "w_a", "w_b")  # operands of bf16


@pytest.mark.parametrize("states_as", STATES)
@pytest.mark.parametrize("tiled", [False, True])
def test_rows_of_a_large_batch_are_as_each_alone(tiled: bool, states_as: str, ctx: CudaContext) -> None:
    """In the batch a block takes all value heads of a key head in turn, or on Hopper heads from a ring of
    matrices; alone blocks share the state. Some rows of the batch are padding.

    Not bit by bit: the projection ahead takes another kernel for many rows.
    """
    rows = max(2 * ctx.device.info.num_sms // KEY_HEADS, RING_HEADS * ctx.device.info.num_sms // HEADS) + 5
    rng = np.random.default_rng(7)
    width = (2 * KEY_HEADS + HEADS) * DIM
    sizes = {
        "M": HIDDEN, "H": HEADS, "K": DIM, "V": DIM, "F": width, "A": HEADS * DIM, "W": TAPS, "X": TAPS - 1,
        "N": rows, "Y": 1,
    }  # fmt: skip
    dtypes = {o.name: "bf16" if o.name in SIXTEEN else o.dtypes[0] for o in GATED_DELTA.operands}
    dtypes["delta"] = states_as
    given: dict[str, Any] = {"layer": 0, "eps": 1e-6, "key_eps": 1e-6, "tiled": tiled}
    attrs = {name: given[name] for name in GATED_DELTA.attrs}
    program = one_call(GATED_DELTA, {**sizes, "T": rows, "R": rows}, dtypes, attrs)
    weights = {
        t.name: raw(
            rng.standard_normal(t.sizes({})).astype(np.float32) * np.float32(t.sizes({})[-1] ** -0.5), t.dtype
        )
        for t in program.tensors(Kind.WEIGHT)
    }
    states = {
        t.name: rng.standard_normal(t.sizes({})).astype(np.float32) for t in program.tensors(Kind.STATE)
    }
    x = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    vectors = {
        t.name: rng.standard_normal(t.sizes({})).astype(np.float32)
        for t in program.tensors(Kind.INPUT)
        if t.dtype == "f32" and t.name != "x"
    }
    fresh, padding = rng.random(rows) < 0.2, np.isin(np.arange(rows), (3, 4, rows - 2))

    def run(which: Array) -> dict[str, Array]:
        count = len(which)
        here = {**sizes, "T": count, "R": count}
        steps = {
            "x": x[which], "state_ids": np.where(padding[which], -1, which).astype(np.int32),
            "state_saves": np.full(count, -1, np.int32),
            "query_starts": np.arange(count, dtype=np.int32), "query_lens": np.ones(count, np.int32),
            "context_lens": np.where(fresh[which], 1, 100).astype(np.int32),
        }  # fmt: skip
        inputs = vectors | steps
        held = {name: a.copy() for name, a in states.items()}  # which are written back
        outputs = run_once(ctx, one_call(GATED_DELTA, here, dtypes, attrs), weights, held, inputs, here)
        return {**outputs, **held}

    whole = run(np.arange(rows))
    assert np.abs(whole["out"]).max() > 0.01
    assert not whole["out"][padding].any()
    for name in ("conv", "delta"):
        np.testing.assert_array_equal(whole[name][padding], run(np.array([0]))[name][padding])  # untouched
    for row in (0, 1, rows // 2, rows - 1):
        alone = run(np.array([row]))
        found = {name: (alone[name][row], whole[name][row]) for name in ("conv", "delta")}
        found["out"] = alone["out"][0], whole["out"][row]
        for name, (one, many) in found.items():
            assert row_errors(many.reshape(1, -1), one.reshape(1, -1)).max() < ERROR, name
