"""The GPU's op bench on a driver without a GPU: references stand in for kernels, so that the comparison
itself is seen to be right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pegainfer.ops.delta  # noqa: F401  (declares)
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.measure.cuda.opbench import LEAST, CudaFamilyBench, CudaOps, launched
from pegainfer.measure.cuda.sampling_check import SamplingCheck
from pegainfer.measure.cuda.stepbench import CudaSteps
from pegainfer.measure.step_shapes import StepShape
from pegainfer.measure.workload import Family
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.forward import forward, groups
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.compose import run_reference
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.rounding import WRITTEN
from pegainfer.ops.sampler import sampler
from pegainfer.ops.spec import REGISTRY
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.tensor import encode, from_bf16
from tests.support.fake_cuda import FakeCuda, FakeLt, Launched, fake_cuda, fake_kernels

Array = np.ndarray[Any, Any]
CONFIG = Qwen3Config(
    vocab_size=5000, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=256,
    tie_word_embeddings=True,
)  # fmt: skip
SHAPES = (StepShape(1, 1, 20), StepShape(6, 1, 40), StepShape(1, 19, 33))
OPS = {
    "embedding", "qkv_norm_rope_append", "attention", "linear_residual", "gate_up_swiglu", "lm_head",
    "adjust_logits", "sample_tokens", "append_tokens", "token_logprobs",
}  # fmt: skip


def programs(blocks: int = 8) -> list[Program]:
    formats = {n: "q4_1" if len(shape) == 2 else "bf16" for n, shape in TABLE.shapes(CONFIG).items()}
    steps = Formats("bf16", "bf16", "bf16")
    sizes = Sizes(groups(CONFIG, 16, steps), (blocks,), 256)
    return [forward(CONFIG, formats, sizes, steps), sampler(CONFIG.vocab_size, CONFIG.vocab_size, 8, 257, 20)]


@pytest.fixture(scope="module")
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda(FakeCuda(memory=1 << 34, l2=1 << 18)) as fake:
        yield fake


@pytest.fixture(scope="module")
def device(cuda: FakeCuda, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaOps]:
    ctx = CudaContext(kernels=fake_kernels(tmp_path_factory.mktemp("kernels")))
    ctx.__dict__["lt"] = FakeLt()
    yield CudaOps(ctx=ctx)


@pytest.fixture(scope="module")
def families(device: CudaOps) -> list[Family]:
    return device.families(programs())


def store(address: int, array: Array, dtype: str) -> None:
    """The fake device's memory is the host's."""
    host = encode(array, dtype)
    ctypes.memmove(address, host.ctypes.data, host.nbytes)


def as_kernel(
    bench: CudaFamilyBench, call: OpCall, shape: StepShape, wrong: float = 0.0
) -> Callable[[], None]:
    """Runs the whole call by its reference; `wrong` is added to what it writes."""
    env = bench._repeated.env(shape)
    weights = {n: from_bf16(bench._bits[t.name]) for n, t in call.tensors.items() if t.name in bench._bits}

    def run() -> None:
        tensors = {n: bench._executor.tensor(t, env) for n, t in call.tensors.items() if n not in weights}
        arrays = {n: t.numpy(bench._ctx.stream) for n, t in tensors.items()} | weights
        run_reference(call.spec, call.sizes(env), arrays, call.attrs)
        for o in call.spec.operands:
            if o.role in WRITTEN and o.name in tensors:
                t = tensors[o.name]
                store(t.address, (arrays[o.name] + wrong).astype(arrays[o.name].dtype), t.dtype)

    return run


def report(bench: CudaFamilyBench, shape: StepShape, wrong: float = 0.0) -> Any:
    options = next(iter(bench.family.options().values()))
    env = bench._repeated.env(shape)
    for number, (call, _, _) in enumerate(bench._executor.walk(bench._inputs(shape, options), env)):
        if number < bench._repeated.lead:
            as_kernel(bench, call, shape)()
            continue
        sampled = SamplingCheck(bench._executor, bench._ctx, call, env, *bench._weights(call))
        return sampled.check("case", as_kernel(bench, call, shape, wrong))
    raise AssertionError


def test_the_families_are_the_ops_of_a_step_in_the_arithmetic_of_the_gpu(families: list[Family]) -> None:
    assert {f.spec.name for f in families} == OPS
    assert {f.dtypes[w] for f in families for w in f.weights} == {"bf16"}  # whatever the file has
    assert all(f.dtypes["norm"] == "f32" for f in families if "norm" in f.dtypes)


@pytest.mark.parametrize("name", sorted(OPS))
def test_what_the_reference_computes_is_right_and_what_differs_is_not(
    name: str, device: CudaOps, families: list[Family]
) -> None:
    family = next(f for f in families if f.spec.name == name)
    bench = device.bench(family, SHAPES)
    for shape in SHAPES:
        right = report(bench, shape)
        assert right.faults == ()
        assert all(d.share <= 1 for d in right.deviations.values())
        assert report(bench, shape, wrong=1.0).faults
    bench.close()


def test_timing_replays_a_graph_of_all_calls(device: CudaOps, families: list[Family]) -> None:
    family = next(f for f in families if f.spec.name == "lm_head")
    bench = device.bench(family, SHAPES)
    timing = bench.time(SHAPES[1], {})
    assert bench._repeated.calls == LEAST
    assert timing.us(0.5) == 1000 / LEAST  # the fake clock says a millisecond
    assert timing.cost.flops == 2 * 6 * CONFIG.vocab_size * CONFIG.hidden_size
    bench.close()


@pytest.mark.parametrize("shape", SHAPES[1:], ids=["decoded", "prefilled"])
def test_what_is_timed_reads_a_work_list_that_was_made(
    shape: StepShape, device: CudaOps, families: list[Family], cuda: FakeCuda
) -> None:
    """A check lowers the step in other ways too, which may have lists of their own."""
    family = next(f for f in families if f.spec.name == "attention")
    bench = device.bench(family, SHAPES)
    report(bench, shape)
    cuda.launches.clear()
    bench.time(shape, {})
    made = {pointers(x, 0, 1)[0] for x in cuda.launches if x.kernel == "attention_plan"}
    kernel = f"attention_{'decode' if shape.count == 1 else 'prefill_tiles'}_bf16_d64"
    # Of what follows the walk: Args, which the boxes of prefill's pages precede.
    read = {pointers(x, int(shape.count > 1), 8)[7] for x in cuda.launches[-4:] if x.kernel == kernel}
    assert read and read <= made
    bench.close()


def pointers(launch: Launched, index: int, count: int) -> tuple[int, ...]:
    """The first of a struct's fields."""
    block = (ctypes.c_void_p * (index + 1)).from_address(launch.params)[index]
    return tuple((ctypes.c_uint64 * count).from_address(block or 0))


def test_a_row_names_kernels_and_their_sources(device: CudaOps, families: list[Family]) -> None:
    family = next(f for f in families if f.spec.name == "gate_up_swiglu")
    shapes = (StepShape(1, 1, 20), StepShape(1, 300, 300))
    bench = device.bench(family, shapes)
    few, many = (bench.identity(shape) for shape in shapes)
    assert few.variant == many.variant == "cuda.sm90a.bf16"
    assert few.kernels[-1].startswith("skinny_bf16") and few.memory == "dram"
    assert "cublaslt" in many.kernels and many.source != few.source
    bench.close()


def test_prefilling_kernels_are_told_from_those_without_work(device: CudaOps, families: list[Family]) -> None:
    family = next(f for f in families if f.spec.name == "attention")
    bench = device.bench(family, SHAPES)
    one, many = bench.identity(SHAPES[0]).kernels, bench.identity(SHAPES[2]).kernels
    assert one and all(k.startswith("attention_") and "_decode_" in k for k in one)
    assert many == ("attention_prefill_tiles_bf16_d64", "attention_merge_prefill_bf16_d64")
    bench.close()


def test_ids_alone_are_no_floats(device: CudaOps, families: list[Family]) -> None:
    family = next(f for f in families if f.spec.name == "append_tokens")
    bench = device.bench(family, SHAPES)
    assert bench.identity(SHAPES[0]).variant == "cuda.sm90a.i32"
    bench.close()


def test_each_op_of_a_step_is_charged_with_what_it_adds(
    device: CudaOps, families: list[Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that says a microsecond a launch."""

    def count(ctx: CudaContext, work: list[Any], repeats: int, where: str) -> list[float]:
        return [float(len(work))] * repeats

    monkeypatch.setattr("pegainfer.measure.cuda.stepbench.graph_times", count)
    shapes = (StepShape(3, 1, 40), StepShape(1, 70, 100))
    forward = programs(blocks=21)[0]
    bench = CudaSteps(device._ctx, forward, shapes)
    wanted = {f.key for f in families if f.spec.name != "embedding"}
    few, many = (bench.time(s, wanted, launched) for s in shapes)
    assert {key[0] for key in few.calls} == {
        "qkv_norm_rope_append", "attention", "linear_residual", "gate_up_swiglu", "lm_head",
    }  # fmt: skip
    layers = {"lm_head": 1}
    assert few.us == 1 + sum(t.us * layers.get(k[0], 2) for k, t in few.calls.items())  # 1: the embedding
    assert few.cost == forward.on_one_rank().cost(shapes[0].env)
    gate = next(t for k, t in few.calls.items() if k[0] == "gate_up_swiglu")
    (kernel,) = gate.kernels  # the norm's sums come from the product before it
    assert kernel.startswith("packed_int4_pair_8")
    (attend,) = (t for k, t in many.calls.items() if k[0] == "attention")
    assert attend.kernels == ("attention_prefill_tiles_bf16_d64", "attention_merge_prefill_bf16_d64")
    bench.close()


def test_a_recurrence_is_compared_whole(device: CudaOps) -> None:
    """No token of it can be looked at without those before it."""
    sizes = {"N": 9, "Y": 2, "H": 2, "K": 8, "V": 16, "F": 2 * 8 + 2 * 16}
    spec = REGISTRY["gated_delta_rule"]
    bf16 = {"out", "qkv", "a", "b"}
    dtypes = {o.name: "bf16" if o.name in bf16 else o.dtypes[0] for o in spec.operands}
    family = Family(spec, sizes, dtypes, {"layer": 0, "eps": 1e-6, "tiled": False}, 1)
    bench = device.bench(family, SHAPES)
    for shape in SHAPES:
        assert report(bench, shape).faults == ()
        assert report(bench, shape, wrong=0.5).faults
