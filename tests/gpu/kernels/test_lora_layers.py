"""Layers with adapters at sizes of models: any mix of adapters gives the reference's results, in one launch
and in several, and with a norm that is folded into the GEMM behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.lowering import Step, keeps_whole
from pegainfer.lower.cuda.plan import PlannedLaunch
from pegainfer.lower.cuda.planning import plan_step, rules
from pegainfer.ops.cases.common import i32, normal, weights
from pegainfer.ops.cases.fused import norm_gain
from pegainfer.ops.cases.pointwise import rotation_table
from pegainfer.ops.compose import STAGED, STAGED_ROWS, one_call
from pegainfer.ops.lora_layers import (
    LORA_GATE_UP_SWIGLU,
    LORA_LINEAR_RESIDUAL,
    LORA_QKV_NORM_ROPE_APPEND,
    weight_operands,
)
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.rounding import rounded
from pegainfer.ops.spec import Arrays, OpSpec, Role
from pegainfer.ops.tensor import Kind, Tensor
from tests.gpu.harness import raw, run_once, sized

Array = np.ndarray[Any, Any]
FLOAT32 = ("norm", "q_norm", "k_norm", "cos_sin")
WIDTH, INNER = sized((2560, 1024), (256, 192))
FEED_FORWARD, HEADS, KV_HEADS, HEAD = sized((4864, 16, 4, 128), (320, 4, 2, 64))
ADAPTERS = 20
# Bounds of the errors of inputs and results that are rounded to bf16. SPREAD: the root mean square of the
# errors, relative to that of the results. MOST: the greatest error, relative to the result plus the root mean
# square of all results.
SPREAD, MOST = 0.01, 0.3


def errors(got: Array, want: Array) -> tuple[float, float]:
    wide = want.astype(np.float64)
    error, size = np.abs(got - wide), float(np.sqrt(np.mean(wide**2)))
    return float(np.sqrt(np.mean(error**2))) / size, float((error / (np.abs(wide) + size)).max())


def operands(after: OpSpec, rng: np.random.Generator, tokens: int) -> tuple[dict[str, int], Arrays]:
    """Sizes and arrays of the second op, without its residual stream and without factors."""
    if after is LORA_GATE_UP_SWIGLU:
        both = {"w_gate": weights(rng, FEED_FORWARD, WIDTH), "w_up": weights(rng, FEED_FORWARD, WIDTH)}
        return {"M": WIDTH, "F": FEED_FORWARD}, {"norm": norm_gain(rng, WIDTH), **both}
    blocks = tokens // 16 + 2
    sizes = {"M": WIDTH, "H": HEADS, "G": KV_HEADS, "D": HEAD, "A": HEADS * HEAD, "B": KV_HEADS * HEAD}
    return sizes | {"P": 64, "N": blocks, "Y": 1, "S": 16}, {
        "kv": np.zeros((blocks, 1, 2, KV_HEADS, 16, HEAD), np.float32),
        "norm": norm_gain(rng, WIDTH),
        "wq": weights(rng, HEADS * HEAD, WIDTH), "wk": weights(rng, KV_HEADS * HEAD, WIDTH),
        "wv": weights(rng, KV_HEADS * HEAD, WIDTH), "positions": i32(rng.integers(0, 64, tokens)),
        "slots": i32(rng.permutation(blocks * 16)[:tokens]), "cos_sin": rotation_table(64, HEAD, 1e4),
    }  # fmt: skip


class Layer:
    """The GEMM that ends a layer, then the one that begins with a norm, both with adapters."""

    def __init__(self, after: OpSpec, tokens: int, rank: int) -> None:
        rng = np.random.default_rng(3 * tokens + rank)
        self.after, self.tokens = after, tokens
        own, self.arrays = operands(after, rng, tokens)
        self.sizes = {**own, "K": INNER, "I": ADAPTERS, "W": rank}
        self.arrays |= {
            "x": normal(rng, (tokens, WIDTH)), "a": normal(rng, (tokens, INNER)),
            "w": weights(rng, WIDTH, INNER), "adapters": i32(rng.integers(-1, ADAPTERS, tokens)),
        }  # fmt: skip
        for w in (*weight_operands(LORA_LINEAR_RESIDUAL), *weight_operands(after)):
            n, k = self.arrays[w.name].shape
            self.arrays[f"down_{w.name}"] = normal(rng, (ADAPTERS, rank, k)) / np.float32(k**0.5)
            self.arrays[f"up_{w.name}"] = normal(rng, (ADAPTERS, rank, n)) * np.float32(3 / rank**0.5)
            self.arrays[f"ranks_{w.name}"] = i32(rng.integers(rank // 2, rank + 2, ADAPTERS))
        for name, a in self.arrays.items():
            if name not in FLOAT32 and a.dtype == np.float32:
                self.arrays[name] = rounded(a, "bf16")

    def program(self, dtype: str) -> Program:
        first = {**self.sizes, "T": self.tokens, "N": WIDTH}
        dtypes = {o.name: "i32" if o.dtypes == ("i32",) else dtype for o in LORA_LINEAR_RESIDUAL.operands}
        calls = list(one_call(LORA_LINEAR_RESIDUAL, first, dtypes, {}).calls)
        tensors = {name: calls[-1].tensors[name] for name in ("x", "adapters")}
        kinds = {Role.OUT: Kind.OUTPUT, Role.WEIGHT: Kind.WEIGHT, Role.STATE: Kind.STATE}
        for o in self.after.operands:
            if o.name in tensors or (o.optional and o.name not in self.arrays):
                continue
            stored = "i32" if o.dtypes == ("i32",) else "f32" if o.name in FLOAT32 else dtype
            kind = Kind.WEIGHT if o.name in FLOAT32 else kinds.get(o.role, Kind.INPUT)
            shape = tuple("T" if a == "T" else int(a) if a.isdigit() else self.sizes[a] for a in o.axes)
            tensors[o.name] = Tensor(o.name, shape, stored, kind)
        attrs = {"eps": 1e-5} | ({"layer": 0} if self.after is LORA_QKV_NORM_ROPE_APPEND else {})
        return Program("layer", (*calls, OpCall.of(self.after, attrs, **tensors)))

    def given(self, *kinds: Kind) -> Arrays:
        """The arrays of the program's tensors of these kinds."""
        rows = i32(np.arange(self.tokens))
        arrays = {**self.arrays, f"x{STAGED}": self.arrays["x"], STAGED_ROWS: rows}
        return {t.name: arrays[t.name].copy() for t in self.program("f32").tensors(*kinds)}

    def reference(self, **changed: Array) -> Arrays:
        """Outputs and the cache, computed in float64 but for tensors between the parts of the two ops."""
        states = self.given(Kind.STATE)
        executor = ReferenceExecutor(self.program("f32"), {**self.given(Kind.WEIGHT), **states})
        return executor.run(self.given(Kind.INPUT) | changed, {"T": self.tokens}) | states


@pytest.mark.parametrize("after", [LORA_GATE_UP_SWIGLU, LORA_QKV_NORM_ROPE_APPEND], ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("tokens", "rank"),
    [(1, 16), (1, 128), (3, 5), (8, 16), (9, 40), (16, 64), (20, 16), (32, 16), (33, 16), (64, 16), (64, 128),
     (100, 16), (300, 8)],
)  # fmt: skip
def test_a_layer_with_adapters(after: OpSpec, tokens: int, rank: int, ctx: CudaContext) -> None:
    layer, env = Layer(after, tokens, rank), {"T": tokens}
    program = layer.program("bf16")
    calls = program.lowered(keep=keeps_whole).calls
    plan = plan_step(calls, Step(ctx.target, env, False), rules())
    if tokens <= 64 and ctx.target.info.capability == (9, 0):
        kernels = [launch.kernel for launch in plan.launches if isinstance(launch, PlannedLaunch)]
        assert sum(k.startswith("skinny_lora") for k in kernels) == 2 and plan.applied == {"fold_norm": 1}
    constants, states = layer.given(Kind.WEIGHT), layer.given(Kind.STATE)
    held = {k: raw(a, "f32" if k in FLOAT32 else "bf16") for k, a in constants.items()}
    got = run_once(ctx, program, held, states, layer.given(Kind.INPUT), env) | states
    want = layer.reference()
    for name, values in got.items():
        spread, most = errors(values, want[name])
        assert spread < SPREAD and most < MOST, f"{name}: {spread:.4f}, at most {most:.4f}"
    plain = layer.reference(adapters=np.full(tokens, -1, np.int32))
    moved, _ = errors(plain["x"], want["x"])
    assert moved > 3 * SPREAD or (layer.arrays["adapters"] < 0).all(), (
        "the adapters change x too little for this test"
    )
