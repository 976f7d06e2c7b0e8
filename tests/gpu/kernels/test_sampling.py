"""Sampling at a vocabulary of true size: the reference's tokens to the last one, for every mix of options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.ranks import shard_of
from pegainfer.ops.compose import run_reference
from pegainfer.ops.sample import SAMPLE
from pegainfer.ops.sampler import sampler
from pegainfer.ops.spec import Role
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.gpu.harness import EAGER, sized

Array = np.ndarray[Any, Any]
V, SLOTS, WIDTH, K = sized(151_936, 9_216), 40, 300, 20
IDS = V - 267  # the columns behind them are padding, as in Qwen3's head
ROWS = 32


def logits_of(rng: np.random.Generator) -> Array:
    """Rows that are peaked, flat, full of equals, and far apart."""
    x = rng.standard_normal((ROWS, V)).astype(np.float32) * np.float32(3)
    x[1] = np.round(x[1])  # thousands share a score
    x[2] = 0.5  # all do: candidates do not fit into shared memory
    x[3] *= 100
    x[4, ::2] = -np.inf
    x[5, 7] = np.nan
    x[6, 9] = np.inf
    x[7] = -np.inf
    x[8] = np.where(rng.random(V) < 0.5, np.float32(-0.0), np.float32(0.0))
    x[:, IDS:] = [[np.nan], [1e30], [np.inf], [-np.inf]] * (ROWS // 4)
    return x


def step(rng: np.random.Generator) -> dict[str, Array]:
    """Inputs of one sampler step; every row has other options."""
    i32, f32 = np.int32, np.float32
    bias_lens = np.array([3 if r % 4 == 0 else 0 for r in range(ROWS)], i32)
    total = int(bias_lens.sum())
    masks = np.full((3, -(-IDS // 32)), 0xFFFFFFFF, np.uint32)
    masks[1] = rng.integers(0, 2**32, masks.shape[1], np.uint64).astype(np.uint32)
    masks[2] = 0
    masks[2, 17] = 0b1010
    history_lens = rng.integers(2, WIDTH - 1, ROWS).astype(i32)
    seq_lens = np.array([1, 2, 3, 1], i32)
    return {
        "logits": logits_of(rng),
        "bias_ids": np.concatenate([rng.choice(IDS, 3, False) for _ in range(total // 3)]).astype(i32),
        "bias_values": rng.standard_normal(total).astype(f32) * f32(5),
        "bias_starts": (np.cumsum(bias_lens) - bias_lens).astype(i32),
        "bias_lens": bias_lens,
        "masks": masks,
        "mask_rows": np.array([r % 5 - 1 if r % 5 < 4 else -1 for r in range(ROWS)], i32).clip(-1, 2),
        "banned_tokens": rng.integers(0, IDS, int(seq_lens.sum())).astype(i32),
        "banned_seq_starts": (np.cumsum(seq_lens) - seq_lens).astype(i32),
        "banned_seq_lens": seq_lens,
        "banned_starts": np.array([0 if r % 3 else 2 for r in range(ROWS)], i32),
        "banned_lens": np.array([2 if r % 2 else 0 for r in range(ROWS)], i32),
        "slots": rng.permutation(SLOTS)[:ROWS].astype(i32),
        "history_lens": history_lens,
        "prompt_lens": (history_lens // 2).astype(i32),
        "repetition_penalty": np.where(np.arange(ROWS) % 3 == 0, 1.3, 1.0).astype(f32),
        "frequency_penalty": np.where(np.arange(ROWS) % 4 == 1, 0.7, 0.0).astype(f32),
        "presence_penalty": np.where(np.arange(ROWS) % 5 == 1, -0.4, 0.0).astype(f32),
        "temperature": np.array([0.0, 1.0, 0.3, 1.7, 1e-3][: 5] * ROWS, f32)[:ROWS],
        "top_k": np.array([0, 50, 1, 0, 5000, IDS, 100_000] * ROWS, i32)[:ROWS],
        "top_p": np.array([1.0, 0.9, 0.5, 0.99, 0.0, 1.0, 0.3, 0.999] * ROWS, f32)[:ROWS],
        "min_p": np.array([0.0, 0.0, 0.05, 0.0, 1e-4, 1.0] * ROWS, f32)[:ROWS],
        "seeds": rng.integers(0, 2**64, ROWS, np.uint64),
        "draws": rng.integers(0, 1000, ROWS).astype(i32),
        "top_lens": np.array([-1, 0, 5, K, 1] * ROWS, i32)[:ROWS],
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_the_reference(seed: int, ctx: CudaContext) -> None:
    check_step(seed, ctx)


def of_rank(logits: Array, ctx: CudaContext) -> Array:
    """Logits as the sampler of one of several ranks takes them: its columns of each row, side by side."""
    own = shard_of(logits.shape[1], ctx.target)
    if own is None:
        return logits
    found = np.full(logits.shape, np.nan, np.float32)
    part = logits[:, own.start : own.stop]
    found.reshape(-1)[: part.size] = part.reshape(-1)
    return found


def check_step(seed: int, ctx: CudaContext) -> None:
    """On a rank of several, each of them calls it with the same seed."""
    rng = np.random.default_rng(seed)
    inputs = step(rng)
    history = rng.integers(0, IDS, (SLOTS, WIDTH)).astype(np.int32)
    program = sampler(V, IDS, SLOTS, WIDTH, K)
    env = {"L": ROWS, "J": len(inputs["bias_ids"]), "E": 3, "U": len(inputs["banned_tokens"]), "O": 4}
    backend = CudaBackend(ctx, {}, EAGER)
    held = DeviceTensor.from_numpy(history, "i32", ctx.stream)
    executor = backend.prepare(program, {"history": held}, env)
    given = {**inputs, "logits": of_rank(inputs["logits"], ctx)}
    outputs = {k: t.numpy(ctx.stream) for k, t in executor.run(given, env).items()}

    want = {**inputs, "history": history.copy()}
    for o in SAMPLE.operands:
        if o.role is Role.OUT:
            shape = tuple({"L": ROWS, "K": K}[a] for a in o.axes)
            want[o.name] = np.zeros(shape, np.int32 if o.dtypes[0] == "i32" else np.float32)
    sizes = {**env, "V": V, "I": -(-IDS // 32), "Z": SLOTS, "X": WIDTH, "K": K}
    run_reference(SAMPLE, sizes, want, {"vocab_size": IDS})
    for name in ("status", "tokens", "ranks", "top_ids"):
        assert outputs[name].tolist() == want[name].tolist(), name
    np.testing.assert_allclose(outputs["logprobs"], want["logprobs"], rtol=2e-6, atol=2e-5)
    np.testing.assert_allclose(outputs["top_logprobs"], want["top_logprobs"], rtol=2e-6, atol=2e-5)
    assert held.numpy(ctx.stream).tolist() == want["history"].tolist()
