"""The whole pass of one decoded row as one launch: against the launches it stands for, float32, and itself.

Caches hold NaN wherever the row has no token yet and in all blocks that are not its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.row_pass import recognise
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.runtime.bf16 import from_bf16
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.gpu.harness import EAGER, sized
from tests.gpu.onerow import ONE, Model, Shape, taken

Array = np.ndarray[Any, Any]
# Around the ends of pages and of blocks, and where a row's keys are cut into 2, 4 … 32 parts.
CONTEXTS = sized(
    (1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 512, 1000, 2048, 4000, 4100), (1, 16, 17, 257)
)
SOME = sized((1, 17, 257, 1000, 4100), (17, 257))
LARGE = sized((17, 1000), (17,))  # where the reference takes a second a step
LONG, SHORT = sized((4000, 5), (300, 5))  # the most parts that fit, and one
REPEATS = sized(50, 3)
# Two ways of rounding the same pass to bf16 differ by so much, in standard deviations of what is compared:
# the most of a vector's elements, and their root mean square. (Qwen3-4B, 3 layers: 0.06 and 0.012.)
MOST, MEAN = 0.09, 0.02
SHAPES = {
    # Fewer rows than blocks in every product, one head.
    "tiny": Shape("qwen3", 64, 1, 1, 64, 128, 97, 3),
    "smollm2": Shape("llama", 576, 9, 3, 64, 1536, sized(5000, 1000), 3),
    # A width that is no multiple of a warp's columns.
    "uneven": Shape("qwen3", 328, 6, 2, 128, 840, 1003, 3, block=48),
    "groups of 8": Shape("llama", 768, 16, 2, 64, 1024, 777, 2, block=128),
    "0.6B": Shape("qwen3", 1024, 16, 8, 128, 3072, 3000, 3, block=32),
    "4B": Shape("qwen3", 2560, 32, 8, 128, 9728, 1000, 2),
    "8B": Shape("qwen3", 4096, 32, 8, 128, 12288, 1001, 1, block=64, tied=False),
    # FP8 weights, of fewer rows than blocks, of rows that no 8 warps share, and of two rows a stage.
    "tiny in FP8": Shape("qwen3", 128, 2, 1, 64, 256, 97, 3, form="fp8_r128"),
    "smollm2 in FP8": Shape("llama", 640, 10, 2, 64, 1536, sized(5000, 1000), 3, form="fp8_r128"),
    "4B in FP8": Shape("qwen3", 2560, 32, 8, 128, 9728, 1000, 2, form="fp8_r128"),
    "8B in FP8": Shape("qwen3", 4096, 32, 8, 128, 12288, 1001, 1, block=64, form="fp8_r128"),
}
WATCHED = [
    "tiny",
    "smollm2",
    "uneven",
    "groups of 8",
    "tiny in FP8",
    "smollm2 in FP8",
]  # where every access is watched
EVERY = sized(list(SHAPES), WATCHED)
DIFFERENT = sized(
    ["tiny", "smollm2", "4B", "4B in FP8"], ["tiny", "smollm2", "tiny in FP8"]
)  # parts of 1, 3 and 8 KV heads
THIRTEEN = ["tiny", "smollm2"]  # models of 3 layers, 13 products


@pytest.fixture(scope="module")
def model(ctx: CudaContext, request: pytest.FixtureRequest) -> Iterator[Model]:
    if ctx.device.info.arch != "90a":
        pytest.skip("the pass of one row is made for Hopper")
    yield Model(ctx, SHAPES[request.param])


def models(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", names, indirect=True)


def apart(got: Array, want: Array) -> tuple[float, float]:
    """The most that two vectors differ, and the root mean square, in standard deviations of `want`."""
    error = (got.astype(np.float64) - want) / want.std()
    return float(np.abs(error).max()), float(np.sqrt(np.mean(error**2)))


# Against the launches it stands for


@models(EVERY)
def test_it_gives_what_its_launches_give(model: Model) -> None:
    for context in CONTEXTS:
        step = model.step(context, token=context % model.shape.vocabulary)
        got, want = (model.run(e, step) for e in (model.passed, model.plain))
        logits, x = apart(got.logits, want.logits), apart(got.x, want.x)
        cached = apart(taken(got, step), taken(want, step))
        print(f"{context}: logits {logits}, x {x}, cached {cached}")
        for most, mean in (logits, x, cached):
            assert most < MOST and mean < MEAN, context


@models(EVERY)
def test_it_is_as_near_to_float32_as_its_launches(model: Model) -> None:
    """Errors of both are draws from one distribution, of whose norms the ratio spreads by 1 / √independent.

    Twice that in practice, as in test_executor; four times those are allowed, and a fifth in any case.
    """
    shape = model.shape
    contexts = LARGE if shape.hidden > 2000 else SOME
    constants = model.constants()
    errors = np.zeros(2)
    scale = 0.0
    for context in contexts:
        step = model.step(context, token=context % shape.vocabulary)
        reference = ReferenceExecutor(model.exact, constants | {"kv": from_bf16(step.bits)})
        exact = reference.run(step.inputs, ONE)["logits"][0]
        results = [model.run(e, step) for e in (model.passed, model.plain)]
        errors += [float(np.sum((r.logits - exact) ** 2.0)) for r in results]
        scale += float(np.sum(exact**2.0))
    passed, plain = np.sqrt(errors)
    independent = len(contexts) * min(shape.hidden, shape.vocabulary)
    print(f"errors {passed / scale**0.5:.5f}, of launches {plain / scale**0.5:.5f}")
    assert passed < 2e-2 * scale**0.5
    assert passed < max(1.2, 1 + 8 * independent**-0.5) * plain


def edges(context: int, kv_heads: int, blocks: int) -> set[int]:
    """Tokens at the ends of the row, of its first page and of some of the parts that the kernel makes."""
    pages, parts = -(-context // 16), 1
    while 2 * parts <= min(blocks // kv_heads, 32, pages // 8):
        parts *= 2
    assert parts > 1
    starts = [16, *(16 * (pages * part // parts) for part in (1, parts // 2, parts - 1))]
    return {0, context - 2, context - 1, *starts, *(start - 1 for start in starts)}


@models(DIFFERENT)
def test_every_token_is_looked_at(model: Model) -> None:
    """One token outweighs all others together: it can be neither missed nor mistaken for another."""
    usual = model.run(model.plain, model.step(LONG)).logits
    for token in sorted(edges(LONG, model.shape.kv_heads, model.ctx.device.info.num_sms)):
        step = model.looking_at(LONG, token)
        got, want = (model.run(e, step).logits for e in (model.passed, model.plain))
        print(f"{token}: {apart(got, want)}, without {apart(usual, want)}")
        assert apart(usual, want)[1] > 10 * MEAN, token
        most, mean = apart(got, want)
        assert most < MOST and mean < MEAN, token


# Against itself


@pytest.mark.parametrize("graphs", [False, True], ids=["as launches", "in graphs"])
@models(DIFFERENT)
def test_steps_repeat_bit_by_bit(model: Model, graphs: bool) -> None:
    executor = model.executor(CudaOptions(graphs=graphs, tune=False))
    if graphs:
        executor.capture(ONE, decode_only=True)
    for context in (SHORT, LONG):
        step = model.step(context)
        model.fill(step.bits)
        first = model.again(executor, step)
        assert all(model.again(executor, step) == first for _ in range(REPEATS)), context
        # As by any other executor, whatever its launches found before them.
        assert model.run(model.passed, step).exactly == first


@models(DIFFERENT)
def test_contexts_in_between_leave_nothing_behind(model: Model) -> None:
    """A row in many parts, in one, and in many again."""
    long, short = (model.step(n, cached=False) for n in (LONG, SHORT))
    model.fill(long.bits)
    first = model.again(model.passed, long)
    alone = model.again(model.passed, short)
    for _ in range(REPEATS):
        assert model.again(model.passed, long) == first
        assert model.again(model.passed, short) == alone


@models(DIFFERENT)
def test_two_executors_on_one_stream_do_not_disturb_each_other(model: Model) -> None:
    pair = [model.passed, model.executor(EAGER)]
    steps = [model.step(n, cached=False) for n in (LONG, SHORT)]
    model.fill(steps[0].bits)
    alone = [model.again(e, s) for e, s in zip(pair, steps, strict=True)]
    for _ in range(REPEATS):
        for executor, step in zip(pair, steps, strict=True):  # nothing is waited for in between
            executor.run(step.inputs, ONE)
        assert [model.exactly(executor) for executor in pair] == alone


# Hostile steps


@models(DIFFERENT)
def test_a_token_without_a_slot_is_not_cached(model: Model) -> None:
    for context in (SHORT, LONG):
        cached, lost = (model.step(context, cached=c) for c in (True, False))
        kept = model.run(model.passed, cached)
        got = model.run(model.passed, lost)
        assert np.array_equal(got.bits, lost.bits)
        assert got.exactly == kept.exactly


@models(DIFFERENT)
def test_a_step_of_nothing_but_padding_changes_nothing(model: Model) -> None:
    step, nothing = model.step(LONG), model.padding()
    first = model.run(model.passed, step).exactly
    # Attention reads no key then: nobody may run ahead of a block that projects keys and values alone.
    for _ in range(REPEATS):
        got = model.run(model.passed, nothing)
    assert np.isfinite(got.logits).all() and np.isfinite(got.x).all()
    assert np.array_equal(got.bits, nothing.bits)
    assert model.run(model.passed, step).exactly == first


@models(DIFFERENT)
@pytest.mark.parametrize("token", [-1, -(2**31), 2**31 - 1, None], ids=str)
def test_a_token_that_is_none_is_no_wild_read(model: Model, token: int | None) -> None:
    """None: the first that the vocabulary lacks."""
    step = model.step(SHORT)
    first = model.run(model.passed, step).exactly
    unknown = model.shape.vocabulary if token is None else token
    got = model.run(model.passed, model.step(SHORT, token=unknown))
    assert np.isfinite(got.logits).all()
    taken(got, step)
    assert model.run(model.passed, step).exactly == first


# The count of launches, from which tags are made


def counters(model: Model, executor: CudaExecutor) -> DeviceTensor:
    """[2] u32: how many launches there have been, and blocks that have ended."""
    row_pass = recognise(executor.program.calls)
    assert row_pass is not None
    _, _, launches, _ = row_pass.exchange_layout(model.ctx.device.info)
    return DeviceTensor.at(executor._kept["row pass"].address + launches, (2,), "u32", executor)


@models(DIFFERENT)
def test_launches_are_counted(model: Model) -> None:
    executor, step = model.executor(EAGER), model.step(LONG, cached=False)
    model.fill(step.bits)
    for _ in range(3):
        executor.run(step.inputs, ONE)
    assert counters(model, executor).numpy(model.ctx.stream).tolist() == [3, 0]


@models(THIRTEEN)
@pytest.mark.parametrize("modulus", [65535, 2**32], ids=["tags", "numbers"])
def test_results_outlive_the_counts_end(model: Model, modulus: int) -> None:
    """A product's number is launch · products + i in 32 bits, its tag that modulo 65535: both come to 0.

    At each of a layer's products, the next layer's first and the head, in the second of three launches.
    """
    executor, step = model.executor(EAGER), model.step(LONG, cached=False)
    model.fill(step.bits)
    first = model.again(executor, step)
    count, products = counters(model, executor), 4 * model.shape.layers + 1
    for i in (0, 1, 2, 3, 4, products - 1):
        launch = -i * pow(products, -1, modulus) % modulus
        before = np.array([(launch - 1) % 2**32], np.uint32)
        model.ctx.stream.upload(count.address, before.ctypes.data, before.nbytes)
        model.ctx.stream.synchronize("count")
        assert all(model.again(executor, step) == first for _ in range(3)), i
        assert count.numpy(model.ctx.stream).tolist() == [(launch + 2) % 2**32, 0]
