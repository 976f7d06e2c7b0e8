"""Programs lowered, staged, captured and replayed on a driver without a GPU: what is launched with what."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.kernels.manifest import KernelsError
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.forward import forward, groups
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.coarse import GATE_UP_SWIGLU
from pegainfer.ops.compose import one_call
from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.tensor import Kind
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.driver import CudaError
from pegainfer.runtime.cuda.tensor import DeviceTensor, to_bf16
from pegainfer.runtime.weights.weight import float32
from tests.support.fake_cuda import ILLEGAL_ADDRESS, FakeCuda, FakeLt, Launched, fake_cuda, fake_kernels
from tests.support.heads import Heads, heads_program

Array = np.ndarray[Any, Any]
CONFIG = Qwen3Config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=64,
    tie_word_embeddings=True,
)  # fmt: skip
LARGEST = {"T": 300, "R": 5, "L": 5}
WIDTH = 4


class Rig:
    def __init__(self, fake: FakeCuda, folder: Path, options: CudaOptions) -> None:
        self.fake = fake
        self.ctx = CudaContext(kernels=fake_kernels(folder))
        self.lt = self.ctx.__dict__["lt"] = FakeLt()
        formats = dict.fromkeys(TABLE.shapes(CONFIG), "bf16")
        steps = Formats("bf16", "bf16", "bf16")
        program = forward(CONFIG, formats, Sizes(groups(CONFIG, 16, steps), (8,), 16 * WIDTH), steps)
        table = np.zeros((64, 64), np.float32)
        raw = {"cos_sin": float32(table)}
        self.backend = CudaBackend(self.ctx, raw, options, Dummy())
        self.kv = DeviceTensor.empty((8, 2, 2, 2, 16, 64), "bf16", "kv")
        self.executor: CudaExecutor = self.backend.prepare(program, {"kv": self.kv}, LARGEST)
        self.backend.load()
        fake.launches.clear()

    def step(self, *counts: int) -> tuple[dict[str, Array], dict[str, int]]:
        """Inputs of rows with so many tokens each."""
        i32, total = np.int32, sum(counts)
        starts = np.cumsum(counts) - counts
        return {
            "token_ids": np.arange(1, total + 1, dtype=i32), "positions": np.arange(total, dtype=i32),
            "kv.places": np.arange(total, dtype=i32), "query_starts": starts.astype(i32),
            "query_lens": np.array(counts, i32), "context_lens": np.array(counts, i32),
            "kv.block_table": np.ones((len(counts), WIDTH), i32), "logit_rows": starts.astype(i32),
        }, {"T": total, "R": len(counts), "L": len(counts), "C": total, "Q": total}  # fmt: skip


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with fake_cuda() as fake:
        yield Rig(fake, tmp_path, CudaOptions())


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Rig]:
    """A step of one row as launches, as where no kernel serves its whole pass."""
    with fake_cuda() as fake:
        yield Rig(fake, tmp_path, CudaOptions(row_pass=False))


def argument(launch: Launched, index: int, kind: Any) -> Any:
    """A kernel's argument as the device would read it."""
    addresses = (ctypes.c_void_p * (index + 1)).from_address(launch.params)
    return kind.from_address(addresses[index]).value


def kernels(fake: FakeCuda) -> list[str]:
    return [launch.kernel for launch in fake.launches]


def test_decode_streams_weights_and_long_prefill_calls_the_library(rig: Rig) -> None:
    rig.executor.run(*rig.step(1, 1, 1))
    names = kernels(rig.fake)
    assert names[:5] == [
        "attention_plan", "take_rows_16", "rms_norm_bf16", "skinny_bf16_8_1",
        "attention_decode_append_bf16_d64",
    ]  # fmt: skip
    assert names[-3:] == ["take_rows_16", "rms_norm_bf16", "skinny_bf16_8_1"]
    assert not any("prefill" in n for n in names) and not rig.lt.products
    rig.fake.launches.clear()
    rig.executor.run(*rig.step(60, 60, 60, 60, 60))
    prefill = {"attention_prefill_tiles_bf16_d64", "rms_norm_bf16", "silu_mul_pairs_bf16"}
    assert prefill <= set(kernels(rig.fake))
    assert [p.m for p in rig.lt.products[:4]] == [300] * 4
    assert [p.accumulate for p in rig.lt.products[:4]] == [False, True, False, True]


@pytest.mark.parametrize("counts", [(1, 1), (30, 30, 20)], ids=str)
def test_a_residual_leaves_what_the_norm_after_it_needs(counts: tuple[int, ...], rig: Rig) -> None:
    """So only the first norm of a step, and that of the chosen rows, are launches."""
    rig.executor.run(*rig.step(*counts))
    products = [n for n in rig.fake.launches if n.kernel.startswith(("skinny", "wide"))]
    assert len(products) == 4 * CONFIG.num_layers + 1 and not rig.lt.products
    assert kernels(rig.fake).count("rms_norm_bf16") == 2

    def pointers(launch: Launched) -> tuple[int, ...]:
        """skinny::Args: out, squares, norm, normed, next_squares."""
        block = (ctypes.c_void_p * 3).from_address(launch.params)[2]
        return tuple((ctypes.c_uint64 * 5).from_address(block or 0))

    qkv, o, gate_up, down, qkv_after = map(pointers, products[:5])
    assert o[2] and o[3] and o[4] == gate_up[1] and down[4] == qkv_after[1]
    assert qkv[1] == 0 and qkv[2:] == (0, 0, 0) and o[1] == down[1] == 0
    last_down = pointers(products[-2])
    assert last_down[2:] == (0, 0, 0)  # the rows for the logits are chosen first


def test_the_work_list_is_made_once_a_step(rig: Rig) -> None:
    rig.executor.run(*rig.step(1, 1))
    assert kernels(rig.fake).count("attention_plan") == 1
    assert kernels(rig.fake).count("attention_decode_append_bf16_d64") == CONFIG.num_layers


def test_one_row_is_one_launch(rig: Rig) -> None:
    rig.executor.run(*rig.step(1))
    assert kernels(rig.fake) == ["row_pass_bf16_d64"]


def test_one_row_needs_no_work_list(apart: Rig) -> None:
    rig = apart
    rig.executor.run(*rig.step(1))
    assert "attention_plan" not in kernels(rig.fake)
    rig.fake.launches.clear()
    rig.executor.run(*rig.step(5))  # several tokens: prefilled
    assert kernels(rig.fake).count("attention_plan") == 1
    assert kernels(rig.fake).count("attention_decode_row_bf16_d64") == CONFIG.num_layers


def test_a_layer_of_one_row_is_five_launches(apart: Rig) -> None:
    """Norm, rotation and the cache's append are attention's, on heads that the projection leaves to it."""
    rig = apart
    rig.executor.run(*rig.step(1))
    layer = ["skinny", "attention_decode_append_row_bf16_d64", "skinny", "skinny", "skinny"]
    names = [n.split("_bf16")[0] if n.startswith("skinny") else n for n in kernels(rig.fake)]
    assert names[2:-3] == layer * CONFIG.num_layers
    listed = rig.executor.explain({"T": 1, "R": 1, "L": 1}, decode_only=True)
    assert listed.count("attention_decode_append_row_bf16_d64") == CONFIG.num_layers
    assert "norm_rope_append_bf16" not in listed

    def pointers(launch: Launched, index: int, count: int) -> tuple[int, ...]:
        block = (ctypes.c_void_p * (index + 1)).from_address(launch.params)[index]
        return tuple((ctypes.c_uint64 * count).from_address(block or 0))

    projection, attention, *_, projection_after, attention_after = rig.fake.launches[2:9]
    heads, cache, q_norm, k_norm, positions, slots, cos_sin = pointers(attention, 2, 7)  # Projected
    assert heads == pointers(projection, 2, 1)[0] == pointers(attention_after, 2, 1)[0]
    assert heads == pointers(projection_after, 2, 1)[0]
    assert cache == pointers(attention, 1, 3)[2] and len({q_norm, k_norm, positions, slots, cos_sin, 0}) == 6
    assert list((ctypes.c_int32 * 1).from_address(slots)) == [0]


def test_ops_that_are_looked_at_one_by_one_leave_all_that_they_declare(rig: Rig) -> None:
    inputs, env = rig.step(1)
    rig.executor.run(inputs, env)
    rig.fake.launches.clear()
    for _, _, run in rig.executor.walk(inputs, env):
        run()
    for kernel in ("norm_rope_append_bf16_d64", "attention_decode_row_bf16_d64"):
        assert kernels(rig.fake).count(kernel) == CONFIG.num_layers


@pytest.mark.parametrize(
    ("change", "left"), [({}, True), ({"layer": 1}, False), ({"times": 2}, False)], ids=str
)
def test_heads_are_left_to_the_only_attention_that_reads_them(
    change: dict[str, int], left: bool, rig: Rig
) -> None:
    backend = CudaBackend(rig.ctx, {}, CudaOptions(graphs=False), Dummy())
    kv = DeviceTensor.empty(Heads().cache, "bf16", "kv")
    executor = backend.prepare(heads_program(Heads(), **change), {"kv": kv}, {"T": 1, "R": 1})
    listed = executor.explain({"T": 1, "R": 1}, decode_only=True)
    assert ("attention_decode_append_row" in listed, "norm_rope_append_bf16" in listed) == (
        left,
        not left,
    )
    assert "append_row" not in executor.explain({"T": 1, "R": 1}, decode_only=False)


def test_all_but_the_first_kernels_may_start_early(rig: Rig) -> None:
    rig.executor.run(*rig.step(1, 1))
    assert [launch.pdl for launch in rig.fake.launches] == [False, False] + [True] * (
        len(rig.fake.launches) - 2
    )


def test_arguments_are_packed_as_the_kernel_declares_them(rig: Rig) -> None:
    inputs, env = rig.step(1, 1)
    rig.executor.run(inputs, env)
    launch = next(x for x in rig.fake.launches if x.kernel == "take_rows_16")
    assert launch.grid == (2, 1, 1)
    assert argument(launch, 3, ctypes.c_int32) == CONFIG.hidden_size
    assert argument(launch, 4, ctypes.c_int32) == CONFIG.vocab_size
    ids = (ctypes.c_int32 * 2).from_address(argument(launch, 2, ctypes.c_uint64))
    assert list(ids) == [1, 2]  # the staged token ids are where the kernel looks


def test_a_graph_serves_every_step_that_fits_and_padding_is_inert(rig: Rig) -> None:
    rig.executor.capture({"T": 4, "R": 4, "L": 4}, decode_only=True)
    rig.fake.launches.clear()
    outputs = rig.executor.run(*rig.step(1, 1, 1))
    assert (rig.fake.graph_launches, rig.fake.launches) == (1, [])
    assert outputs["logits"].shape == (3, CONFIG.vocab_size)
    step = rig.executor._captured._steps[True][0]
    staged = {t.name: (step.inputs.address(t), t.sizes(step.env)) for t in step.inputs.offsets}
    for name, last in (("kv.places", -1), ("token_ids", 0), ("query_lens", 0), ("context_lens", 0)):
        address, (count,) = staged[name]
        assert list((ctypes.c_int32 * count).from_address(address))[3] == last, name
    rig.executor.run(*rig.step(2, 1))  # not a decode: no graph of its kind
    assert rig.fake.graph_launches == 1 and rig.fake.launches


def test_a_graph_that_can_wait_is_made_when_its_step_first_comes(rig: Rig) -> None:
    rig.executor.capture({"T": 4, "R": 4, "L": 4}, decode_only=True, at_once=False)
    # It ran once, as it is.
    assert rig.fake.launches and not any(launch.captured for launch in rig.fake.launches)
    launched = len(rig.fake.launches)
    rig.fake.launches.clear()
    outputs = rig.executor.run(*rig.step(1, 1, 1))
    assert outputs["logits"].shape == (3, CONFIG.vocab_size)
    assert [launch.captured for launch in rig.fake.launches] == [True] * launched
    assert rig.fake.graph_launches == 1
    rig.fake.launches.clear()
    rig.executor.run(*rig.step(1, 1))
    assert (rig.fake.graph_launches, rig.fake.launches) == (2, [])


def test_padding_is_there_whatever_a_slot_held_before(rig: Rig) -> None:
    for n in (4, 2):
        rig.executor.capture({"T": n, "R": n, "L": n}, decode_only=True)
    slots = next(t for t in rig.executor.program.tensors(Kind.INPUT) if t.name == "kv.places")
    for rows in (3, 3, 3, 3, 3, 4, 4, 4, 4, 3, 3, 3, 3, 1, 4, 1, 2, 3, 1, 4, 2, 3):  # a ring has four slots
        rig.executor.run(*rig.step(*[1] * rows))
        step = rig.executor._captured._steps[True][rows > 2]
        held = (ctypes.c_int32 * step.env["T"]).from_address(step.inputs.address(slots))
        assert list(held) == [*range(rows), -1, -1, -1, -1][: step.env["T"]]


def test_the_smallest_graph_is_taken(rig: Rig) -> None:
    for n in (4, 2):
        rig.executor.capture({"T": n, "R": n, "L": n}, decode_only=True)
    assert [s.env["T"] for s in rig.executor._captured._steps[True]] == [2, 4]
    assert rig.executor._find({"T": 1, "R": 1, "L": 1}, True).env["T"] == 2


def test_sizes_seen_before_are_not_lowered_again(rig: Rig) -> None:
    first = rig.executor.work({"T": 3, "R": 3, "L": 3}, True)
    assert rig.executor.work({"T": 3, "R": 3, "L": 3}, True)[1][1][0] is first[1][1][0]


def test_inputs_that_do_not_fit_are_refused_before_anything_runs(rig: Rig) -> None:
    inputs, env = rig.step(1, 1)
    with pytest.raises(OpError, match=r"input positions; expected \(2,\); got \(1,\)"):
        rig.executor.run({**inputs, "positions": inputs["positions"][:1]}, env)
    with pytest.raises(OpError, match=r"input kv.places; expected \(2,\); got nothing"):
        rig.executor.run({k: v for k, v in inputs.items() if k != "kv.places"}, env)
    with pytest.raises(OpError, match="size T of a step; expected at most 300; got 301"):
        rig.executor.run(*rig.step(301))
    assert not rig.fake.launches


def test_an_error_names_call_op_sizes_and_step(rig: Rig) -> None:
    rig.executor.run(*rig.step(1))
    rig.fake.fail["cuLaunchKernelEx"] = ILLEGAL_ADDRESS
    with pytest.raises(CudaError) as e:
        rig.executor.run(*rig.step(1, 1))
    text = str(e.value)
    assert text.startswith(
        "qwen3 step 2: cuLaunchKernelEx failed; got CUDA_ERROR_ILLEGAL_ADDRESS: illegal address"
    )
    assert "attention T=2 H=4 D=64" in text and "attention_plan" in text


def test_a_missing_state_is_refused(rig: Rig) -> None:
    with pytest.raises(
        OpError, match=r"state kv: \[8, 2, 2, 2, 16, 64\] bf16; expected contiguous; got nothing"
    ):
        rig.backend.prepare(rig.executor.program, {}, LARGEST)


def test_an_op_without_a_kernel_is_refused(rig: Rig) -> None:
    sizes = {"T": 1, "F": 8, "M": 8}
    dtypes = {"out": "f32", "x": "bf16", "norm": "bf16", "w_gate": "bf16", "w_up": "bf16"}
    program = one_call(GATE_UP_SWIGLU, sizes, dtypes, {"eps": 1e-6})
    with pytest.raises(UnsupportedError, match="on CUDA: dtype of norm; expected f32; got bf16"):
        rig.backend.prepare(program, {}, {"T": 1})


def test_weights_are_packed_as_asked(rig: Rig) -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal((3, 8)).astype(np.float32) for _ in "gu")
    order = [2, 0, 1]
    weights = {name: quantized_weight("bf16", values) for name, values in (("w_gate", gate), ("w_up", up))}
    weights["w_up"] = weights["w_up"].take(0, [range(i, i + 1) for i in order])
    dtypes = {"out": "bf16", "x": "bf16", "norm": "f32", "w_gate": "bf16", "w_up": "bf16"}
    program = one_call(GATE_UP_SWIGLU, {"T": 1, "F": 3, "M": 8}, dtypes, {"eps": 1e-6})
    backend = CudaBackend(rig.ctx, weights)
    backend.prepare(program, {}, {"T": 1})
    backend.load()
    (packed,) = backend.store._held.values()
    held = (ctypes.c_uint16 * 48).from_address(packed.address)
    rows = np.array(held).reshape(6, 8)
    assert np.array_equal(rows[0::2], to_bf16(gate)) and np.array_equal(rows[1::2], to_bf16(up)[order])


def test_a_missing_weight_is_named(rig: Rig) -> None:
    dtypes = {"out": "bf16", "x": "bf16", "norm": "f32", "w_gate": "bf16", "w_up": "bf16"}
    program = one_call(GATE_UP_SWIGLU, {"T": 1, "F": 8, "M": 8}, dtypes, {"eps": 1e-6})
    with pytest.raises(OpError, match="weight is missing; expected w_gate"):
        CudaBackend(rig.ctx, {}).prepare(program, {}, {"T": 1})


def test_no_kernels_for_this_gpu_names_the_command(tmp_path: Path) -> None:
    wanted = pytest.raises(KernelsError, match=r"no kernels were built for Fake GPU .*--arch 89")
    with fake_cuda(FakeCuda(capability=(8, 9))), wanted:
        CudaContext(kernels=fake_kernels(tmp_path, "90a"))


def test_too_little_memory_says_for_what(tmp_path: Path) -> None:
    wanted = pytest.raises(
        CudaError, match=r"too little GPU memory for .*; expected \d+ MiB free; got \d+ of 2 MiB"
    )
    with fake_cuda(FakeCuda(memory=2 << 20)) as fake, wanted:
        Rig(fake, tmp_path, CudaOptions())


def test_serving_loads_no_compiler() -> None:
    """What runs programs on the GPU never imports what builds kernels."""
    code = (
        "import sys, pegainfer.lower.cuda.backend, pegainfer.measure.cuda.compare\n"
        "sys.exit('pegainfer.kernels.build' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
