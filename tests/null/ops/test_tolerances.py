"""Tolerances are neither too tight for plain float32 code nor so wide that a wrong kernel passes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pegainfer.ops.coarse
import pegainfer.ops.lora_layers
import pegainfer.ops.reduce
import pegainfer.ops.sample  # noqa: F401  both declare
from pegainfer.ops.check import Trial, check_case, suitable_cases
from pegainfer.ops.spec import REGISTRY, OpSpec, Role
from tests.null.ops import plain_mla, plain_moe
from tests.null.ops.plain_recurrent import conv, delta_rule, layer, sigmoid

Array = np.ndarray[Any, Any]
F32 = np.float32


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scaled by the row's largest value, as squares may leave float32."""
    top = np.maximum(np.abs(x).max(axis=-1, keepdims=True, initial=0), F32(1e-30))
    y = x / top
    return y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True, dtype=F32) + F32(eps) / top / top) * weight


def rope(x: Array, positions: Array, table: Array) -> Array:
    cos, sin = np.split(table[positions][:, None], 2, axis=-1)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(a: dict[str, Array], layer: int, scale: float) -> Array:
    """One pass over blocks of keys with a running maximum, in float32."""
    q, kv, out = a["q"], a["kv"], np.empty_like(a["q"])
    size, group = kv.shape[4], q.shape[1] // kv.shape[3]
    for row, context in enumerate(a["context_lens"]):
        first, count = a["query_starts"][row], a["query_lens"][row]
        for t in range(first, first + count):
            seen = int(context) - (first + count - 1 - t)
            top = np.full(q.shape[1], -np.inf, F32)
            total, acc = np.zeros(q.shape[1], F32), np.zeros(q.shape[1:], F32)
            for i in range(-(-seen // size)):
                held = min(size, seen - i * size)
                page = kv[a["block_table"][row, i], layer, :, :, :held].astype(F32)
                keys, values = np.repeat(page, group, axis=1)
                s = np.einsum("hd,hsd->hs", q[t], keys) * F32(scale)
                new = np.maximum(top, s.max(axis=1))
                p, shrink = np.exp(s - new[:, None]), np.exp(top - new)
                total, top = total * shrink + p.sum(axis=1), new
                acc = acc * shrink[:, None] + np.einsum("hs,hsd->hd", p, values)
            out[t] = acc / total[:, None]
    return out


def append(kv: Array, layer: int, slots: Array, k: Array, v: Array) -> None:
    for which, part in enumerate((k, v)):
        kv[slots // kv.shape[4], layer, which, :, slots % kv.shape[4]] = part


def qkv(a: dict[str, Array], eps: float, layer: int) -> None:
    h, tokens, d = rms_norm(a["x"], a["norm"], eps), len(a["x"]), a["q"].shape[-1]
    q, k, v = (product(a, h, w).reshape(tokens, -1, d) for w in ("wq", "wk", "wv"))
    if "q_norm" in a:
        q, k = rms_norm(q, a["q_norm"], eps), rms_norm(k, a["k_norm"], eps)
    a["q"][...] = rope(q, a["positions"], a["cos_sin"])
    append(a["kv"], layer, a["slots"], rope(k, a["positions"], a["cos_sin"]), v)


def gated_qkv(a: dict[str, Array], eps: float, layer: int) -> None:
    qkv(a, eps, layer)
    a["gate"][...] = product(a, rms_norm(a["x"], a["norm"], eps), "wg")


def gate_up(a: dict[str, Array], eps: float) -> Array:
    h = rms_norm(a["x"], a["norm"], eps)
    gate, up = product(a, h, "w_gate"), product(a, h, "w_up")
    return gate * sigmoid(gate) * up


def of_adapters(stack: Array, a: dict[str, Array], axis: int) -> Array:
    """Each token's own matrix; zeros where it has none and past its rank, which lies on axis 1 or 2."""
    channels = np.arange(stack.shape[axis])
    kept = (channels < a["ranks"][a["adapters"], None]) & (a["adapters"] >= 0)[:, None]
    return np.where(np.expand_dims(kept, 3 - axis), stack[a["adapters"]], F32(0))


def shrink(a: dict[str, Array]) -> None:
    np.copyto(a["out"], np.einsum("tk,txk->tx", a["a"], of_adapters(a["down"], a, 1)))


def expand(a: dict[str, Array]) -> None:
    delta = np.einsum("tx,txn->tn", a["h"], of_adapters(a["up"], a, 1))
    np.copyto(a["x"], a["x"] + delta)


def product(a: dict[str, Array], h: Array, weight: str) -> Array:
    """h · wᵀ, and what adapters add to it where the op has any."""
    result: Array = h @ a[weight].T
    if f"down_{weight}" in a:
        given = {name: a[f"{name}_{weight}"] for name in ("down", "up", "ranks")}
        given |= {"adapters": a["adapters"], "a": h, "x": result}
        given["out"] = given["h"] = np.empty((len(h), given["down"].shape[1]), F32)
        shrink(given)
        expand(given)
    return result


# op -> the same in float32, as a straightforward kernel would do it; writes its outputs
PLAIN: dict[str, Callable[..., None]] = {
    "rms_norm": lambda a, eps: np.copyto(a["out"], rms_norm(a["x"], a["weight"], eps)),
    "head_norm": lambda a, eps: np.copyto(a["x"], rms_norm(a["x"], a["weight"], eps)),
    "silu_mul": lambda a: np.copyto(a["out"], a["gate"] * sigmoid(a["gate"]) * a["up"]),
    "gated_rms_norm": lambda a, eps: np.copyto(
        a["out"], rms_norm(a["x"], a["weight"], eps) * a["gate"] * sigmoid(a["gate"])
    ),
    "sigmoid_gate": lambda a: np.copyto(a["x"], a["x"] * sigmoid(a["gate"])),
    "causal_conv_silu": conv,
    "gated_delta_rule": delta_rule,
    "gated_delta": lambda a, **attrs: layer(a, rms_norm, **attrs),
    "rope": lambda a: np.copyto(a["x"], rope(a["x"], a["positions"], a["cos_sin"])),
    "embedding": lambda a: np.copyto(a["out"], a["table"][a["ids"]]),
    "gather_rows": lambda a: np.copyto(a["out"], a["x"][a["rows"]]),
    "lora_shrink": shrink,
    "lora_lookup": lambda a: np.copyto(
        a["out"], of_adapters(a["table"], a, 2)[np.arange(len(a["ids"])), a["ids"]]
    ),
    "lora_expand": expand,
    "linear": lambda a: np.copyto(a["out"], a["a"] @ a["w"].T),
    "reduce_residual": lambda a: np.copyto(a["x"], a["x"] + a["partial"]),
    "linear_residual": lambda a: np.copyto(a["x"], a["x"] + a["a"] @ a["w"].T),
    "kv_append": lambda a, layer: append(a["kv"], layer, a["slots"], a["k"], a["v"]),
    "attention": lambda a, layer, scale: np.copyto(a["out"], attention(a, layer, scale)),
    "qkv_norm_rope_append": qkv,
    "gated_qkv_norm_rope_append": gated_qkv,
    "gate_up_swiglu": lambda a, eps: np.copyto(a["out"], gate_up(a, eps)),
    "lora_linear_residual": lambda a: np.copyto(a["x"], a["x"] + product(a, a["a"], "w")),
    "lora_qkv_norm_rope_append": qkv,
    "lora_gate_up_swiglu": lambda a, eps: np.copyto(a["out"], gate_up(a, eps)),
    "route_experts": plain_moe.route,
    "expert_gate_up": plain_moe.gate_up,
    "expert_down": plain_moe.down,
    "moe": plain_moe.block,
    "local_experts": plain_moe.local,
    "moe_shard": plain_moe.block,
    "head_linear": plain_mla.head_linear,
    "rope_tail": lambda a: plain_mla.rope_tail(a["x"], a["positions"], a["cos_sin"]),
    "latent_append": plain_mla.append,
    "latent_attention": plain_mla.attention,
    "mla_qkv_append": plain_mla.qkv,
    "mla_attention": plain_mla.layer,
    "lm_head": lambda a, eps: np.copyto(a["logits"], rms_norm(a["x"][a["rows"]], a["norm"], eps) @ a["w"].T),
}

# test_sample.py holds these, against dictionaries and plain Python.
SAMPLING = {"sample", "adjust_logits", "sample_tokens", "append_tokens", "token_logprobs"}


def test_every_other_op_is_here() -> None:
    assert set(PLAIN) == set(REGISTRY) - SAMPLING
    # One copies, one compares, and one chooses by order: test_moe.py spoils it in ways of its own.
    assert set(PLAIN) - set(SPOILT) == {"gather_rows", "local_experts", "route_experts"}


def plainly(spec: OpSpec, spoil: str | None = None) -> Callable[[Trial], None]:
    """The op in float32. `spoil`: an input whose last channel is halved first, a thirtieth of the result."""

    def run(trial: Trial) -> None:
        a = dict(trial.arrays)
        for name, w in trial.weights.items():
            a[name] = w.values()
        if spoil is not None:
            a[spoil] = a[spoil].copy()
            a[spoil][..., -1] /= 2
        with np.errstate(all="ignore"):
            PLAIN[spec.name](a, **trial.attrs)

    return run


def dtypes_of(spec: OpSpec, weights: str, kv: str) -> dict[str, str]:
    named = {o.name: weights for o in spec.operands if o.role is Role.WEIGHT}
    return named | ({"kv": kv} if any(o.name == "kv" for o in spec.operands) else {})


@pytest.mark.parametrize(("weights", "kv"), [("f32", "f32"), ("q4_1", "f16"), ("bf16", "f32")])
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_plain_float32_is_within_tolerance(name: str, weights: str, kv: str) -> None:
    spec = REGISTRY[name]
    dtypes = dtypes_of(spec, weights, kv)
    cases = suitable_cases(spec, 11, dtypes)
    assert cases
    for case in cases:
        report = check_case(spec, case, plainly(spec), dtypes=dtypes)
        assert not report.faults, report


SPOILT = {
    "rms_norm": "weight", "head_norm": "weight", "silu_mul": "up", "rope": "cos_sin", "embedding": "table",
    "linear": "w", "linear_residual": "w", "attention": "q", "kv_append": "k", "qkv_norm_rope_append": "wk",
    "gated_qkv_norm_rope_append": "wg",
    "gate_up_swiglu": "w_up", "lm_head": "w", "gated_rms_norm": "weight", "sigmoid_gate": "gate",
    "causal_conv_silu": "taps", "gated_delta_rule": "qkv", "gated_delta": "out_norm",
    "reduce_residual": "partial",
    "expert_gate_up": "w_up", "expert_down": "w_down", "moe": "w_up", "moe_shard": "w_up",
    "head_linear": "w", "rope_tail": "cos_sin", "latent_append": "norm", "latent_attention": "q",
    "mla_qkv_append": "w_latent", "mla_attention": "w_v",
    "lora_shrink": "down", "lora_lookup": "table", "lora_expand": "up", "lora_linear_residual": "w",
    "lora_qkv_norm_rope_append": "down_wk",
    "lora_gate_up_swiglu": "down_w_up",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SPOILT))
def test_a_last_channel_that_is_half_itself_is_noticed(name: str) -> None:
    """In every case of ordinary values, whatever the sizes."""
    spec = REGISTRY[name]
    cases = [c for c in suitable_cases(spec, 12) if 0 not in (c.sizes.get("T"), c.sizes.get("L"))]
    if name not in ("embedding", "attention", "latent_attention", "mla_attention"):
        cases = [c for c in cases if re.search(r"\bnormal\b", c.label)]
    # such attention does not depend on q
    unremarkable = ("padding alone", "first token", "equal scores", "tiny keys", "of zero", "denormal")
    noticed = {c.label: bool(check_case(spec, c, plainly(spec, SPOILT[name])).faults) for c in cases}
    missed = [label for label, seen in noticed.items() if not seen]
    assert all(any(word in label for word in unremarkable) for label in missed), missed


def round_to_int8(a: Array) -> Array:
    """Blocks of 32 by a scale of their own: what an int8 kernel computes with."""
    blocks = a.reshape(*a.shape[:-1], a.shape[-1] // 32, 32).astype(np.float64)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    step[step == 0] = 1
    return (np.round(blocks / step) * step).reshape(a.shape)


@pytest.mark.parametrize("name", ["linear", "linear_residual"])
@pytest.mark.parametrize("weights", ["q8_0", "q4_1"])
def test_int8_activations_need_their_own_tolerance(name: str, weights: str) -> None:
    spec, output = REGISTRY[name], REGISTRY[name].operands[0].name

    def run(trial: Trial) -> None:
        w = trial.weights["w"].values()
        before = trial.arrays["x"] if name == "linear_residual" else 0
        trial.arrays[output][...] = before + round_to_int8(trial.arrays["a"]) @ w.T.astype(np.float64)

    exact = []
    for case in suitable_cases(spec, 13, {"w": weights}):
        report = check_case(spec, case, run, arithmetic="int8", dtypes={"w": weights})
        assert not report.faults, report
        exact.append(not check_case(spec, case, run, dtypes={"w": weights}).faults)
    assert not all(exact), "rounding to 8 bits must not pass for float32"
