"""A seeded model that decodes one row: its executors, steps with caches full of NaN, and what they leave."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.models.llama import forward as llama
from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.weights import TABLE as LLAMA
from pegainfer.models.qwen3 import forward as qwen3
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.weights import TABLE as QWEN3
from pegainfer.ops.float8 import from_e4m3
from pegainfer.ops.program import Program
from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.bf16 import from_bf16, to_bf16
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.gpu.harness import EAGER, POISON, raw, sized

Array = np.ndarray[Any, Any]
ONE = {"T": 1, "R": 1, "L": 1}
LONGEST = sized(4224, 384)  # tokens: a multiple of every block size
FOREIGN = 3  # blocks that are not the row's
NOTHING = POISON << 8 | POISON  # NaN in bf16
EXPONENT = 7  # its lowest bit in bf16
SEEN = 14.0  # a score beside which thousands of others, normals, are next to nothing


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of `line`, and of the blocks of its cache; the form of the layers' matrices."""

    line: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    layers: int
    block: int = 16
    tied: bool = True
    form: str = "bf16"


@dataclass(frozen=True)
class Step:
    """One decoded row, and the cache before it.

    Args:
        bits: [N, Y, 2, G, S, D], bf16 as uint16.
        inputs: of the program.
        place: block and offset of the new token.
    """

    bits: Array
    inputs: dict[str, Array]
    place: tuple[int, int]


@dataclass(frozen=True)
class Result:
    """logits [V] and x [M] in float32; the cache's bits after the step."""

    logits: Array
    x: Array
    bits: Array

    @property
    def exactly(self) -> tuple[bytes, bytes]:
        return self.logits.tobytes(), self.x.tobytes()


class Model:
    """The model with seeded weights, and its executors: `passed` in one launch, `plain` in many."""

    def __init__(self, ctx: CudaContext, shape: Shape) -> None:
        rng = np.random.default_rng(shape.hidden)
        self.ctx, self.shape = ctx, shape
        width = LONGEST // shape.block
        self.exact, _ = recorded(shape, width + FOREIGN, Formats())
        self.program, shapes = recorded(shape, width + FOREIGN, Formats("bf16", "bf16", "bf16"))
        table = cos_sin_table(LONGEST, inverse_frequencies(shape.head_dim, 1e4, None))
        norms = {n: 1 + rng.standard_normal(s) / 8 for n, s in shapes.items() if len(s) == 1}
        weights = {n: raw(a, "f32") for n, a in (norms | {"cos_sin": table}).items()}
        backend = CudaBackend(ctx, weights, EAGER, Dummy())
        (state,) = self.program.tensors(Kind.STATE)
        self.kv = DeviceTensor.empty(state.sizes({}), "bf16", "kv")
        self.store = backend.store
        self.passed = self.executor(EAGER)
        self.plain = self.executor(replace(EAGER, row_pass=False))
        assert self.passed.explain(ONE, decode_only=True).count("row_pass") == 1
        assert "row_pass" not in self.plain.explain(ONE, decode_only=True)
        backend.load()
        # A period that is prime: no two tokens have the same keys.
        values = to_bf16(rng.standard_normal(1_000_003).astype(np.float32))
        self.cached = np.resize(values, self.kv.shape)
        self.order = rng.permutation(width + FOREIGN)

    def executor(self, options: CudaOptions) -> CudaExecutor:
        return CudaExecutor(self.program, self.store, {"kv": self.kv}, ONE, options, ctx=self.ctx)

    def step(self, context: int, *, token: int = 7, cached: bool = True) -> Step:
        """`cached`: whether the new token goes into the cache."""
        size = self.shape.block
        blocks, (at, offset) = self.order[: -(-context // size)], divmod(context - 1, size)
        bits = np.full(self.cached.shape, NOTHING, np.uint16)
        bits[blocks] = self.cached[blocks]
        # Values · 2^n, so that the mean of many is no less than that of a few.
        bits[blocks, :, 1] += np.uint16(max(0, round(math.log2(context) / 2) - 1) << EXPONENT)
        bits[blocks[at], :, :, :, offset:] = NOTHING
        table = np.full((1, LONGEST // size), self.order[-1], np.int32)
        table[0, : len(blocks)] = blocks
        slot = int(blocks[at]) * size + offset if cached else -1
        numbers = {
            "token_ids": token, "positions": context - 1, "kv.places": slot, "query_starts": 0,
            "query_lens": 1, "context_lens": context, "logit_rows": 0,
        }  # fmt: skip
        inputs = {n: np.array([v], np.int32) for n, v in numbers.items()}
        return Step(bits, inputs | {"kv.block_table": table}, (int(blocks[at]), offset))

    def looking_at(self, context: int, token: int) -> Step:
        """A step in which every head of every layer looks at that cached token, or at the new one: its score
        is SEEN and all others' are normals; or all others' are -SEEN.
        """
        step, size = self.step(context), self.shape.block
        blocks, (new, last) = self.order[: -(-context // size)], step.place
        block, offset = int(self.order[token // size]), token % size
        self.fill(step.bits)
        layer = 0
        for call, _, run in self.plain.walk(step.inputs, ONE):
            run()
            if call.spec.name != "qkv_norm_rope_append":
                continue
            q = self.plain.tensor(call.tensors["q"], ONE).numpy(self.ctx.stream)[0]
            scores = np.full(self.shape.heads // self.shape.kv_heads, SEEN * self.shape.head_dim**0.5)
            units = q.reshape(self.shape.kv_heads, len(scores), -1).astype(np.float64)
            keys = np.stack([np.linalg.lstsq(unit, scores, rcond=None)[0] for unit in units])
            bits = self.cache()
            if token < context - 1:
                bits[block, layer, 0, :, offset] = to_bf16(keys.astype(np.float32))
            else:
                own = bits[new, layer, 0, :, last:].copy()
                bits[blocks, layer, 0] = to_bf16(-keys.astype(np.float32))[:, None]
                bits[new, layer, 0, :, last:] = own
            self.fill(bits)
            layer += 1
        bits = self.cache()
        bits[new, :, :, :, last:] = NOTHING
        return replace(step, bits=bits)

    def padding(self) -> Step:
        """A step of nothing but padding."""
        step = self.step(1, token=0, cached=False)
        nothing = np.zeros(1, np.int32)
        return replace(step, inputs=step.inputs | {"query_lens": nothing, "context_lens": nothing})

    def fill(self, bits: Array) -> None:
        self.ctx.stream.upload(self.kv.address, bits.ctypes.data, bits.nbytes)
        self.ctx.stream.synchronize("cache")

    def cache(self) -> Array:
        bits = np.empty(self.kv.shape, np.uint16)
        self.ctx.stream.download(bits.ctypes.data, self.kv.address, bits.nbytes)
        self.ctx.stream.synchronize("cache")
        return bits

    def again(self, executor: CudaExecutor, step: Step) -> tuple[bytes, bytes]:
        """Logits and x, bit by bit, on the cache as it is."""
        executor.run(step.inputs, ONE)
        return self.exactly(executor)

    def exactly(self, executor: CudaExecutor) -> tuple[bytes, bytes]:
        logits, x = self.outputs(executor)
        return logits.tobytes(), x.tobytes()

    def outputs(self, executor: CudaExecutor) -> tuple[Array, Array]:
        """logits [V] and x [M] of its last step."""
        outputs = executor.outputs(ONE)
        logits, x = (outputs[n].numpy(self.ctx.stream)[0] for n in ("logits", "x"))
        return logits, x

    def run(self, executor: CudaExecutor, step: Step) -> Result:
        """On the step's own cache, with NaN in all outputs before."""
        for memory in (executor._arena, executor._scratch):
            self.ctx.stream.fill(memory.address, POISON, memory.nbytes)
        self.fill(step.bits)
        executor.run(step.inputs, ONE)
        return Result(*self.outputs(executor), self.cache())

    def constants(self) -> dict[str, Array]:
        """Weights as the device has them, in float32."""
        rows = {t.name: t.shape[0] for t in self.program.tensors(Kind.WEIGHT)}
        found: dict[str, Array] = {}
        for (names, kind, layout), held in self.store._held.items():
            assert isinstance(names, tuple)
            if kind == "scales":
                continue
            whole = held.numpy(self.ctx.stream)
            if kind == "codes":
                scales = self.store._held[names, "scales", layout].numpy(self.ctx.stream)
                whole = from_e4m3(whole) * scales[:, None]
            if layout == "pairs":
                found |= {n: whole[i::2] for i, n in enumerate(names)}
            else:
                ends = np.cumsum([rows[n] for n in names])
                found |= dict(zip(names, np.split(whole, ends[:-1]), strict=True))
        return found


def recorded(shape: Shape, blocks: int, formats: Formats) -> tuple[Program, dict[str, tuple[int, ...]]]:
    """The forward pass over a cache of so many blocks, and the shapes of its weights by name."""
    s = shape
    form = s.form if formats.activation == "bf16" else "bf16"
    fields: dict[str, Any] = {
        "vocab_size": s.vocabulary, "hidden_size": s.hidden, "intermediate_size": s.feed_forward,
        "num_layers": s.layers, "num_heads": s.heads, "num_kv_heads": s.kv_heads, "head_dim": s.head_dim,
        "norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "max_position_embeddings": LONGEST,
        "tie_word_embeddings": s.tied,
    }  # fmt: skip
    if s.line == "llama":
        config = LlamaConfig(**fields)
        shapes = LLAMA.shapes(config)
        sizes = Sizes(llama.groups(config, s.block, formats), (blocks,), LONGEST)
        program = llama.forward(config, stored(shapes, form), sizes, formats)
    else:
        other = Qwen3Config(**fields)
        shapes = QWEN3.shapes(other)
        sizes = Sizes(qwen3.groups(other, s.block, formats), (blocks,), LONGEST)
        program = qwen3.forward(other, stored(shapes, form), sizes, formats)
    return program, shapes


def stored(shapes: dict[str, tuple[int, ...]], form: str) -> dict[str, str]:
    """Forms of the weights; `form`: of the layers' matrices."""
    matrices = {n: form if n.startswith("layers.") else "bf16" for n in shapes}
    return {n: "f32" if len(s) == 1 else matrices[n] for n, s in shapes.items()}


def taken(result: Result, step: Step) -> Array:
    """The new token's keys and values [Y, 2, G, D]; checks that the step changed nothing else."""
    block, offset = step.place
    new = result.bits[block, :, :, :, offset].copy()
    result.bits[block, :, :, :, offset] = step.bits[block, :, :, :, offset]
    assert np.array_equal(result.bits, step.bits)
    return from_bf16(new)
