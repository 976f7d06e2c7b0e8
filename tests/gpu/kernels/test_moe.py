"""Experts on the GPU: products and whole blocks beside the reference, whichever kernels take them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.experts import STREAM_TOKENS
from pegainfer.lower.cuda.experts_few import TOKENS
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.ops.coarse import GATE_UP_SWIGLU
from pegainfer.ops.compose import one_call, run_reference
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.moe import EXPERT_DOWN, EXPERT_GATE_UP, MOE, ROUTE_EXPERTS
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.rounding import rounded, row_errors
from pegainfer.runtime.weights.weight import Weight
from tests.gpu.harness import raw, run_once, sized

Array = np.ndarray[Any, Any]
N, K, M, F = 16, 4, sized(2048, 128), sized(768, 64)
# Experts, experts of a token, widths of the residual stream and of an expert.
MODELS = {
    "30B-A3B": sized((128, 8, 2048, 768), (16, 4, 64, 64)),
    "35B-A3B": sized((256, 8, 2048, 512), (32, 4, 64, 64)),
    "V2-Lite": sized((64, 6, 2048, 1408), (16, 4, 64, 64)),
    "shared expert of 35B-A3B": sized((1, 1, 2048, 512), (1, 1, 64, 16)),
}
FEW = STREAM_TOKENS
LEAST = TOKENS  # tokens up to which every block chooses the experts itself
QWEN = {"eps": 1e-6, "sigmoid": False, "renormalize": True, "scale": 1.0, "groups": 1, "kept_groups": 1}
SHARED = QWEN | {"sigmoid": True, "renormalize": False}
ERROR = 0.015  # of a row's norm; rounding each intermediate result to bf16 gives up to 0.007
CLEAR = 0.01  # lead of the last chosen expert's logit over the next one, in deviations of the logits


@lru_cache(maxsize=2)
def stacks(seed: int, n: int = N, m: int = M, f: int = F) -> dict[str, Array]:
    """Matrices of n experts, not to be written: rolled copies of those of a few."""
    rng = np.random.default_rng(seed)
    shapes = {"w_gate": (f, m), "w_up": (f, m), "w_down": (m, f)}
    found = {}
    for name, shape in shapes.items():
        base = rng.standard_normal((min(n, 8), *shape), np.float32) * np.float32(shape[-1] ** -0.5)
        base = rounded(base, "bf16")
        found[name] = np.stack([np.roll(base[e % len(base)], e, axis=-1) for e in range(n)])
    return found


@lru_cache(maxsize=2)
def raw_stacks(n: int, m: int, f: int) -> dict[str, Weight]:
    return {name: raw(a, "bf16") for name, a in stacks(0, n, m, f).items()}


def gate_up(ctx: CudaContext, w: dict[str, Array], h: Array, experts: Array) -> Array:
    sizes = {"T": len(h), "N": N, "K": K, "M": M, "F": F}
    dtypes = {"act": "bf16", "h": "bf16", "experts": "i32", "w_gate": "bf16", "w_up": "bf16"}
    program = one_call(EXPERT_GATE_UP, sizes, dtypes, {})
    weights = {name: raw(w[name], "bf16") for name in ("w_gate", "w_up")}
    return run_once(ctx, program, weights, {}, {"h": h, "experts": experts}, sizes)["act"]


def down(ctx: CudaContext, w: dict[str, Array], act: Array, experts: Array, gates: Array) -> Array:
    sizes = {"T": len(act), "N": N, "K": K, "M": M, "F": F}
    dtypes = {"out": "f32", "act": "bf16", "experts": "i32", "gates": "f32", "w_down": "bf16"}
    program = one_call(EXPERT_DOWN, sizes, dtypes, {})
    inputs = {"act": act, "experts": experts, "gates": gates}
    return run_once(ctx, program, {"w_down": raw(w["w_down"], "bf16")}, {}, inputs, sizes)["out"]


def choices(rng: np.random.Generator, tokens: int, how: str) -> Array:
    """[T, K] distinct experts in ascending order."""
    if how == "one expert":
        return np.tile(np.arange(3, 3 + K, dtype=np.int32), (tokens, 1))
    picked = np.sort(np.argsort(rng.random((tokens, N)), axis=1)[:, :K], axis=1).astype(np.int32)
    return (
        np.where(rng.random(picked.shape) < 0.3, -1, picked).astype(np.int32) if how == "absent" else picked
    )


@pytest.mark.parametrize("how", ["spread", "one expert", "absent"])
@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1, STREAM_TOKENS, STREAM_TOKENS + 1, 129, 700])
def test_products_match_the_reference(tokens: int, how: str, ctx: CudaContext) -> None:
    rng, w = np.random.default_rng(tokens), stacks(1)
    h = rounded(rng.standard_normal((tokens, M), np.float32), "bf16")
    experts, gates = choices(rng, tokens, how), rng.random((tokens, K), np.float32)
    sizes = {"T": tokens, "N": N, "K": K, "M": M, "F": F}
    want = {"act": np.empty((tokens, K, F), np.float32), "out": np.empty((tokens, M), np.float32)}
    up = {"act": want["act"], "h": h, "experts": experts, "w_gate": w["w_gate"], "w_up": w["w_up"]}
    run_reference(EXPERT_GATE_UP, sizes, up, {})
    act = gate_up(ctx, w, h, experts)
    assert row_errors(act, want["act"]).max() < ERROR
    assert (act[experts < 0] == 0).all()
    after = {"out": want["out"], "act": act, "experts": experts, "gates": gates, "w_down": w["w_down"]}
    run_reference(EXPERT_DOWN, sizes, after, {})
    assert row_errors(down(ctx, w, act, experts, gates), want["out"]).max() < ERROR


@pytest.mark.parametrize("tokens", [FEW, 300])
def test_a_token_gives_the_same_bits_in_any_company(tokens: int, ctx: CudaContext) -> None:
    """Of the same kernel: others of the step, and their order, change nothing."""
    rng, w = np.random.default_rng(2), stacks(2)
    h = rounded(rng.standard_normal((tokens, M), np.float32), "bf16")
    experts, order = choices(rng, tokens, "spread"), rng.permutation(tokens)
    gates = rng.random((tokens, K), np.float32)
    whole, moved = gate_up(ctx, w, h, experts), gate_up(ctx, w, h[order], experts[order])
    assert moved.tobytes() == whole[order].tobytes()
    sums = down(ctx, w, whole, experts, gates)
    assert down(ctx, w, moved, experts[order], gates[order]).tobytes() == sums[order].tobytes()
    part = slice(tokens // 3, tokens // 2)
    assert gate_up(ctx, w, h[part], experts[part]).tobytes() == whole[part].tobytes()
    if tokens <= FEW:  # a part of many tokens may be few enough for another kernel, which adds up elsewise
        alone = down(ctx, w, whole[part], experts[part], gates[part])
        assert alone.tobytes() == sums[part].tobytes()


@pytest.mark.parametrize("tokens", [4, 200])
def test_nan_in_one_row_harms_no_other(tokens: int, ctx: CudaContext) -> None:
    rng, w = np.random.default_rng(3), stacks(3)
    h = rounded(rng.standard_normal((tokens, M), np.float32), "bf16")
    experts, gates = choices(rng, tokens, "spread"), rng.random((tokens, K), np.float32)
    bad = h.copy()
    bad[2] = np.nan
    others = np.arange(tokens) != 2
    want, got = gate_up(ctx, w, h, experts), gate_up(ctx, w, bad, experts)
    assert np.isnan(got[2]).all() and got[others].tobytes() == want[others].tobytes()
    sums, spoilt = (down(ctx, w, act, experts, gates) for act in (want, got))
    assert np.isnan(spoilt[2]).all() and spoilt[others].tobytes() == sums[others].tobytes()


@pytest.mark.parametrize(("n", "k"), [(128, 8), (256, 8), (512, 10), (60, 4)])
def test_routers_of_published_models(n: int, k: int, ctx: CudaContext) -> None:
    rng = np.random.default_rng(n)
    sizes = {"T": 333, "N": n, "K": k}
    logits = (rng.standard_normal((333, n)) * 3).astype(np.float32)
    logits[5], logits[6, 3], logits[7] = 0, np.nan, np.nan
    attrs = {name: v for name, v in QWEN.items() if name != "eps"}
    want = {"experts": np.empty((333, k), np.int32), "gates": np.empty((333, k), np.float32)}
    run_reference(ROUTE_EXPERTS, sizes, {**want, "logits": logits}, attrs)
    dtypes = {"experts": "i32", "gates": "f32", "logits": "f32"}
    got = run_once(ctx, one_call(ROUTE_EXPERTS, sizes, dtypes, attrs), {}, {}, {"logits": logits}, sizes)
    np.testing.assert_array_equal(got["experts"], want["experts"])
    np.testing.assert_allclose(got["gates"], want["gates"], rtol=1e-5)


# Whole blocks


def block_program(sizes: dict[str, int], attrs: dict[str, Any], *, residual: bool, then: int = 0) -> Program:
    """x = table[ids], then the block: its sum is an output, or is added to x, which is one then.

    then: width of a norm, projections and SwiGLU behind the sum that is added; 0 for none.
    """
    b = Builder("block")
    w = {
        name: b.weight(name, *(sizes[a] for a in axes), dtype="bf16")
        for name, axes in (("table", "VM"), ("w_router", "NM"), ("w_gate", "NFM"), ("w_up", "NFM"))
    }
    w["w_down"] = b.weight("w_down", sizes["N"], sizes["M"], sizes["F"], dtype="bf16")
    w["norm"] = b.weight("norm", sizes["M"], dtype="f32")
    ids = b.input("ids", "T")
    x = (b.output if residual else b.buffer)("x", "T", sizes["M"], dtype="bf16")
    made = (b.buffer if residual else b.output)("out", "T", sizes["M"])
    experts = b.output("experts", "T", sizes["K"], dtype="i32")
    b.emit(EMBEDDING, out=x, table=w.pop("table"), ids=ids)
    b.emit(MOE, attrs, out=made, experts=experts, x=x, **w)
    if residual:
        b.emit(REDUCE_RESIDUAL, x=x, partial=made)
    if then:
        after = {f"w_{n}": b.weight(f"next_{n}", then, sizes["M"], dtype="bf16") for n in ("gate", "up")}
        act = b.output("act", "T", then, dtype="bf16")
        next_norm = b.weight("next_norm", sizes["M"], dtype="f32")
        b.emit(GATE_UP_SWIGLU, {"eps": attrs["eps"]}, out=act, x=x, norm=next_norm, **after)
    return b.build()


class Block:
    """A block of a model's widths with seeded weights, run on the GPU and by the reference."""

    def __init__(self, model: str, rows: int, seed: int) -> None:
        """rows: different rows of x that tokens may have."""
        n, k, m, f = MODELS[model]
        rng = np.random.default_rng(seed)
        self.attrs = SHARED if n == 1 else QWEN
        self.sizes = {"V": rows, "N": n, "K": k, "M": m, "F": f}
        self.weights = dict(stacks(0, n, m, f))
        self.weights["w_router"] = rounded(
            rng.standard_normal((n, m), np.float32) * np.float32(m**-0.5), "bf16"
        )
        self.weights["table"] = rounded(rng.standard_normal((rows, m), np.float32), "bf16")
        self.norm = 1 + rng.standard_normal(m).astype(np.float32) / 8

    def raw(self) -> dict[str, Weight]:
        """The weights as a file holds them."""
        found = dict(raw_stacks(*(self.sizes[axis] for axis in "NMF")))
        found |= {name: raw(self.weights[name], "bf16") for name in ("w_router", "table")}
        return found | {"norm": raw(self.norm, "f32")}

    def run(self, ctx: CudaContext, ids: Array, *, residual: bool = False) -> dict[str, Array]:
        weights = self.raw()
        program = block_program(self.sizes, self.attrs, residual=residual)
        return run_once(ctx, program, weights, {}, {"ids": ids}, {"T": len(ids)})

    def want(self, ids: Array) -> dict[str, Array]:
        """The reference's; `clear`: tokens whose choice does not hang on a rounding."""
        sizes = {**self.sizes, "T": len(ids)}
        made = {
            "out": np.empty((len(ids), sizes["M"]), np.float32),
            "experts": np.empty((len(ids), sizes["K"]), np.int32),
        }
        x = self.weights["table"][ids]
        w = {name: a for name, a in self.weights.items() if name != "table"}
        run_reference(MOE, sizes, {**made, "x": x, "norm": self.norm, **w}, self.attrs)
        scale = np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + self.attrs["eps"])
        logits = np.sort((x / scale * self.norm) @ self.weights["w_router"].T.astype(np.float64), axis=1)
        k = sizes["K"]
        lead = logits[:, -k] - logits[:, -k - 1] if k < sizes["N"] else np.ones(len(ids))
        return {**made, "x": x, "clear": lead > CLEAR * logits.std()}


@pytest.mark.parametrize("tokens", [1, LEAST - 1, LEAST, LEAST + 1, FEW, FEW + 1, sized(1100, 130)])
@pytest.mark.parametrize("model", MODELS)
def test_a_block_of_true_widths(model: str, tokens: int, ctx: CudaContext) -> None:
    block = Block(model, max(tokens, 16), tokens)
    ids = np.arange(tokens, dtype=np.int32)
    if tokens == 1:
        ids = np.flatnonzero(block.want(np.arange(16))["clear"])[:1].astype(np.int32)
    want, got = block.want(ids), block.run(ctx, ids)
    clear = want["clear"]
    assert clear.mean() >= 0.5
    np.testing.assert_array_equal(got["experts"][clear], want["experts"][clear])
    assert row_errors(got["out"], want["out"])[clear].max() < ERROR


@pytest.mark.parametrize("tokens", [1, LEAST, FEW, 3 * FEW])
def test_the_sum_is_added_to_the_residual_stream(tokens: int, ctx: CudaContext) -> None:
    block, ids = Block("30B-A3B", tokens, 5), np.arange(tokens, dtype=np.int32)
    out, x = block.run(ctx, ids)["out"], block.run(ctx, ids, residual=True)["x"]
    before = block.weights["table"][ids]
    assert np.abs(out).max() > 0.1
    np.testing.assert_array_equal(x, rounded(before + out, "bf16"))


@pytest.mark.parametrize("tokens", [LEAST, FEW, sized(2000, 200)])
def test_all_tokens_go_to_the_same_experts(tokens: int, ctx: CudaContext) -> None:
    """Most experts have none. Every token is the same, and so is every result."""
    block, ids = Block("30B-A3B", 1, 6), np.zeros(tokens, np.int32)
    want, got = block.want(ids[:1]), block.run(ctx, ids)
    assert (got["experts"] == got["experts"][0]).all() and (got["out"] == got["out"][0]).all()
    assert row_errors(got["out"][:1], want["out"]).max() < ERROR


@pytest.mark.parametrize("tokens", [LEAST, FEW, 3 * FEW])
def test_of_equal_experts_the_first_are_chosen(tokens: int, ctx: CudaContext) -> None:
    block, ids = Block("35B-A3B", tokens, 7), np.arange(tokens, dtype=np.int32)
    block.weights["w_router"][...] = 0
    want, got = block.want(ids), block.run(ctx, ids)
    np.testing.assert_array_equal(got["experts"], np.tile(np.arange(block.sizes["K"]), (tokens, 1)))
    assert row_errors(got["out"], want["out"]).max() < ERROR


@pytest.mark.parametrize("tokens", [LEAST, FEW, 3 * FEW])
def test_nan_in_one_row_of_a_block_harms_no_other(tokens: int, ctx: CudaContext) -> None:
    block, ids = Block("30B-A3B", tokens, 8), np.arange(tokens, dtype=np.int32)
    want = block.run(ctx, ids)
    block.weights["table"][3] = np.nan
    got = block.run(ctx, ids)
    others = ids != 3
    assert np.isnan(got["out"][3]).all()
    assert all(got[k][others].tobytes() == want[k][others].tobytes() for k in ("out", "experts"))


@pytest.mark.parametrize("model", ["30B-A3B", "35B-A3B"])
def test_a_token_of_a_block_gives_the_same_bits_in_any_company(model: str, ctx: CudaContext) -> None:
    block, ids = Block(model, LEAST, 10), np.arange(LEAST, dtype=np.int32)
    whole = block.run(ctx, ids)["out"]
    assert block.run(ctx, ids[::-1])["out"].tobytes() == whole[::-1].tobytes()
    for first, end in ((0, 1), (3, 5), (7, 8)):
        assert block.run(ctx, ids[first:end])["out"].tobytes() == whole[first:end].tobytes()


@pytest.mark.parametrize("tokens", [1, 5, LEAST])
def test_the_norm_that_follows_begins_where_the_sum_ends(tokens: int, ctx: CudaContext) -> None:
    """A GEMM behind the block takes x times the norm's weight and sums of squares from its last launch."""
    block, ids = Block("30B-A3B", tokens, 11), np.arange(tokens, dtype=np.int32)
    rng, width = np.random.default_rng(tokens), 256
    sizes = block.sizes | {"F": width}
    scale = np.float32(sizes["M"] ** -0.5)
    w = {
        name: rounded(rng.standard_normal((width, sizes["M"]), np.float32) * scale, "bf16")
        for name in ("next_gate", "next_up")
    }
    norm = 1 + rng.standard_normal(sizes["M"]).astype(np.float32) / 8
    program = block_program(block.sizes, block.attrs, residual=True, then=width)
    weights = block.raw() | {name: raw(a, "bf16") for name, a in w.items()} | {"next_norm": raw(norm, "f32")}
    got = run_once(ctx, program, weights, {}, {"ids": ids}, {"T": tokens})
    want = np.empty((tokens, width), np.float32)
    operands = {"out": want, "x": got["x"], "norm": norm, "w_gate": w["next_gate"], "w_up": w["next_up"]}
    run_reference(GATE_UP_SWIGLU, sizes | {"T": tokens}, operands, {"eps": block.attrs["eps"]})
    assert row_errors(got["act"], want).max() < ERROR
    assert got["x"].tobytes() == block.run(ctx, ids, residual=True)["x"].tobytes()


# A shared expert


def with_shared(block: Block, width: int, *, gated: bool) -> Program:
    """x = table[ids], to which the chosen experts' sum and the shared expert's result are added."""
    sizes, attrs = block.sizes, block.attrs
    m, k = sizes["M"], sizes["K"]
    b = Builder("block")
    w = {
        name: b.weight(name, *(sizes[a] for a in axes), dtype="bf16")
        for name, axes in (("table", "VM"), ("w_router", "NM"), ("w_gate", "NFM"), ("w_up", "NFM"))
    }
    w["w_down"] = b.weight("w_down", sizes["N"], m, sizes["F"], dtype="bf16")
    norm, ids = b.weight("norm", m, dtype="f32"), b.input("ids", "T")
    x, partial = b.output("x", "T", m, dtype="bf16"), b.buffer("partial", "T", m)
    experts = b.output("experts", "T", k, dtype="i32")
    b.emit(EMBEDDING, out=x, table=w.pop("table"), ids=ids)
    stack = (1,) if gated else ()
    shared = {
        f"w_{name}": b.weight(f"shared_{name}", *stack, *shape, dtype="bf16")
        for name, shape in (("gate", (width, m)), ("up", (width, m)), ("down", (m, width)))
    }
    if gated:
        one, other = b.buffer("one", "T", 1, dtype="i32"), b.buffer("other", "T", m)
        router = b.weight("shared_router", 1, m, dtype="bf16")
        b.emit(MOE, attrs, out=partial, experts=experts, x=x, norm=norm, **w)
        b.emit(MOE, SHARED, out=other, experts=one, x=x, norm=norm, w_router=router, **shared)
        b.emit(REDUCE_RESIDUAL, x=x, partial=other)
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
        return b.build()
    act, down = b.buffer("act", "T", width, dtype="bf16"), shared.pop("w_down")
    b.emit(GATE_UP_SWIGLU, {"eps": attrs["eps"]}, out=act, x=x, norm=norm, **shared)
    b.emit(MOE, attrs, out=partial, experts=experts, x=x, norm=norm, **w)
    b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    b.emit(LINEAR, out=partial, a=act, w=down)
    b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    return b.build()


@pytest.mark.parametrize("tokens", [1, 3, LEAST, LEAST + 1])
@pytest.mark.parametrize("model", ["35B-A3B", "V2-Lite"])
def test_a_shared_expert_is_added_too(model: str, tokens: int, ctx: CudaContext) -> None:
    """With a gate it is as wide as another expert, without as two of them."""
    gated = model == "35B-A3B"
    block = Block(model, max(tokens, 16), 12)
    width = block.sizes["F"] * (1 if gated else 2)
    m, rng = block.sizes["M"], np.random.default_rng(12)
    shapes = {"gate": (width, m), "up": (width, m), "down": (m, width), "router": (1, m)}
    w = {
        name: rounded(rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5), "bf16")
        for name, shape in shapes.items()
    }
    ids = np.flatnonzero(block.want(np.arange(max(tokens, 16)))["clear"])[:tokens].astype(np.int32)
    want = block.want(ids)
    x = want["x"].astype(np.float64)
    h = x / np.sqrt((x**2).mean(1, keepdims=True) + block.attrs["eps"]) * block.norm
    gate, up = (h @ w[name].astype(np.float64).T for name in ("gate", "up"))
    result = gate / (1 + np.exp(-gate)) * up @ w["down"].astype(np.float64).T
    if gated:
        result /= 1 + np.exp(-h @ w["router"].astype(np.float64).T)
    stack = (1,) if gated else ()
    stored = {f"shared_{name}": raw(w[name].reshape(*stack, *shapes[name]), "bf16") for name in shapes}
    if gated:
        stored["shared_router"] = raw(w["router"], "bf16")
    program = with_shared(block, width, gated=gated)
    got = run_once(ctx, program, block.raw() | stored, {}, {"ids": ids}, {"T": len(ids)})
    np.testing.assert_array_equal(got["experts"], want["experts"])
    added, sums = got["x"] - want["x"], want["out"] + result
    rounding = np.linalg.norm(rounded(x + sums, "bf16") - (x + sums), axis=1) / np.linalg.norm(sums, axis=1)
    assert (row_errors(added, sums) < ERROR + 2 * rounding).all()


def test_counts_of_a_replayed_graph_are_those_of_its_tokens(ctx: CudaContext) -> None:
    """One graph serves steps that choose other experts: the device counts anew each time."""
    for tokens in (LEAST, FEW, 3 * FEW):
        block = Block("30B-A3B", 2 * tokens, 9)
        program = block_program(block.sizes, block.attrs, residual=False)
        weights = block.raw()
        backend = CudaBackend(ctx, weights, CudaOptions())
        executor: CudaExecutor = backend.prepare(program, {}, {"T": tokens})
        backend.load()
        executor.capture({"T": tokens}, False)
        for ids in (np.arange(tokens), np.full(tokens, 1), tokens + np.arange(tokens)):
            ids = ids.astype(np.int32)
            got = {k: t.numpy(ctx.stream) for k, t in executor.run({"ids": ids}, {"T": tokens}).items()}
            assert got["out"].tobytes() == block.run(ctx, ids)["out"].tobytes()
