"""The pass of one decoded row: which programs and GPUs it serves, which steps become it, what it is given."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from pegainfer.kernels.build import ROOT
from pegainfer.lower.cuda import row_pass as module
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.lowering import keeps_whole
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.row_pass import RowPass, recognise, why_launches
from pegainfer.lower.cuda.store import Dummy
from pegainfer.lower.cuda.target import Target
from pegainfer.models.llama import forward as llama
from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.weights import TABLE as LLAMA
from pegainfer.models.qwen3 import forward as qwen3
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.weights import TABLE as QWEN3
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.arguments import PASS, PASS_LAYER
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.layout import packing
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.weights.weight import float32
from tests.support.fake_cuda import FakeCuda, FakeLt, Launched, fake_cuda, fake_kernels

Calls = Sequence[OpCall]
SOURCE = ROOT / "sm90" / "pass" / "operands.cuh"
H100 = DeviceInfo(0, "H100", (9, 0), 132, 50 << 20, 227 << 10, 228 << 10, 80 << 30, 13000)
FIELDS: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 64, "norm_eps": 1e-6, "rope_theta": 1e4, "rope_scaling": None,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SERVED = RowPass(128, 4, 2, 64, 256, 512, 2, 16, "bf16")
# hidden, heads, KV heads, head size, feed-forward, vocabulary, layers
PUBLISHED = {
    "Qwen3-0.6B": (1024, 16, 8, 128, 3072, 151936, 28),
    "Qwen3-1.7B": (2048, 16, 8, 128, 6144, 151936, 28),
    "Qwen3-4B": (2560, 32, 8, 128, 9728, 151936, 36),
    "Qwen3-8B": (4096, 32, 8, 128, 12288, 151936, 36),
    "SmolLM2-135M": (576, 9, 3, 64, 1536, 49152, 30),
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192, 128256, 16),
}
ONE = {"T": 1, "R": 1, "L": 1}


def program(
    line: str = "qwen3", activation: str = "bf16", residual: str = "bf16", kv: str = "", form: str = "bf16",
    **fields: Any,
) -> Program:  # fmt: skip
    """As an executor lowers it. form: of the layers' matrices."""
    formats = Formats(activation, residual, kv or activation)
    if line == "llama":
        config = LlamaConfig(**FIELDS | fields)
        sizes = Sizes(llama.groups(config, 16, formats), (8,), 64)
        made = llama.forward(config, stored(LLAMA.shapes(config), form), sizes, formats)
    else:
        other = Qwen3Config(**FIELDS | fields)
        sizes = Sizes(qwen3.groups(other, 16, formats), (8,), 64)
        made = qwen3.forward(other, stored(QWEN3.shapes(other), form), sizes, formats)
    return made.lowered(keep=keeps_whole)


def stored(shapes: dict[str, tuple[int, ...]], form: str) -> dict[str, str]:
    return {n: form if n.startswith("layers.") and len(s) == 2 else "bf16" for n, s in shapes.items()}


# Programs


@pytest.mark.parametrize("line", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_decoders_program_is_recognised(line: str, tied: bool) -> None:
    assert recognise(program(line, tie_word_embeddings=tied).calls) == SERVED
    assert recognise(program(line, num_layers=1).calls) == replace(SERVED, layers=1)
    wide = program(line, num_heads=6, num_kv_heads=3, head_dim=128, intermediate_size=320, vocab_size=97)
    assert recognise(wide.calls) == RowPass(128, 6, 3, 128, 320, 97, 2, 16, "bf16")


def test_halves_are_recognised_and_not_served() -> None:
    found = recognise(program(activation="f16", residual="f16").calls)
    assert found == replace(SERVED, dtype="f16") and found.lacks(H100) == "bf16, not f16"


def test_a_cache_of_eight_bits_takes_many_launches() -> None:
    calls = program(kv="f8_e4m3").calls
    assert recognise(calls) is None
    assert why_launches(calls, Target(H100)) == "a KV cache of bf16, not f8_e4m3"


def test_weights_of_eight_bits_are_served_with_a_scale_a_row() -> None:
    target = Target(H100)
    assert why_launches(program(form="fp8_r128").calls, target) is None
    reason = why_launches(program(form="fp8_g128").calls, target)
    assert reason == "FP8 weights with a scale a row, not for each 128 columns"
    for number, dtype in ((5, "bf16"), (11, "fp8_r128")):  # a layer in another format, and a head in FP8
        calls = with_tensor(number, "w", dtype=dtype)(program(form="fp8_r128").calls)
        assert why_launches(calls, target) == "one format of all layers' weights, and a head of 16 bits"


@pytest.mark.parametrize(("activation", "residual"), [("f32", "f32"), ("bf16", "f32")])
def test_programs_in_float32_are_not_recognised(activation: str, residual: str) -> None:
    assert recognise(program(activation=activation, residual=residual).calls) is None


def with_attrs(number: int, **attrs: Any) -> Callable[[Calls], Calls]:
    return lambda calls: [
        structs.replace(c, attrs=c.attrs | attrs) if i == number % len(calls) else c
        for i, c in enumerate(calls)
    ]


def with_axis(number: int, letter: str) -> Callable[[Calls], Calls]:
    """One call's axis is eight longer."""

    def changed(calls: Calls) -> Calls:
        call = calls[number]
        call = structs.replace(call, axes=call.axes | {letter: int(call.axes[letter]) + 8})
        return [*calls[:number], call, *calls[number:][1:]]

    return changed


def with_tensor(number: int, operand: str, **change: Any) -> Callable[[Calls], Calls]:
    """One call's operand is another tensor, alike but for the change."""

    def changed(calls: Calls) -> Calls:
        call = calls[number]
        other = structs.replace(call.tensors[operand], name="other", base=None, **change)
        call = structs.replace(call, tensors=call.tensors | {operand: other})
        return [*calls[:number], call, *calls[number:][1:]]

    return changed


def lasting(calls: Calls) -> Calls:
    """The first layer's activations are an output, which somebody may read."""
    act = calls[4].tensors["out"]
    output = Tensor(act.name, act.shape, act.dtype, Kind.OUTPUT)
    swapped = {n: {k: output if t is act else t for k, t in calls[n].tensors.items()} for n in (4, 5)}
    return [structs.replace(c, tensors=swapped.get(n, c.tensors)) for n, c in enumerate(calls)]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda c: [*c[:3], c[4], c[3], *c[5:]], id="another order"),
        pytest.param(lambda c: [*c[:-1], c[-2], c[-1]], id="one op more"),
        pytest.param(lambda c: c[:-1], id="no head"),
        pytest.param(lambda c: c[1:], id="no embedding"),
        pytest.param(lambda c: [c[0], c[-1]], id="no layers"),
        pytest.param(lambda c: [c[0], *c[6:11], *c[1:6], c[-1]], id="layers in another order"),
        pytest.param(with_axis(7, "H"), id="a layer of more heads"),
        pytest.param(with_axis(9, "F"), id="a wider layer"),
        pytest.param(with_axis(11, "V"), id="a head of more tokens"),
        pytest.param(with_attrs(1, eps=1e-5), id="eps of attention's norm"),
        pytest.param(with_attrs(4, eps=1e-5), id="eps of the other norm"),
        pytest.param(with_attrs(-1, eps=1e-5), id="eps of the last norm"),
        pytest.param(with_attrs(7, scale=1.0), id="scale of a layer"),
        pytest.param(with_attrs(7, layer=0), id="cache of another layer"),
        pytest.param(with_tensor(2, "q"), id="attention of another q"),
        pytest.param(with_tensor(3, "a"), id="product of another output"),
        pytest.param(with_tensor(3, "x"), id="sum to another stream"),
        pytest.param(with_tensor(5, "a"), id="product of another activation"),
        pytest.param(with_tensor(6, "x"), id="projection of another stream"),
        pytest.param(with_tensor(11, "x"), id="head of another stream"),
        pytest.param(with_tensor(7, "block_table"), id="another block table"),
        pytest.param(with_tensor(6, "slots"), id="other slots"),
        pytest.param(with_tensor(6, "kv"), id="another cache"),
        pytest.param(lasting, id="activations that last"),
    ],
)
def test_other_programs_are_not_recognised(change: Callable[[Calls], Calls]) -> None:
    calls = program().calls
    assert len(calls) == 12 and recognise(calls) == SERVED
    assert recognise(list(change(calls))) is None


# GPUs and sizes


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_published_models_fit_a_hopper(name: str, block: int) -> None:
    m, h, g, d, f, v, layers = PUBLISHED[name]
    p = RowPass(m, h, g, d, f, v, layers, block, "bf16")
    assert p.lacks(H100) is None
    assert p.stage % 1024 == 0 and p.stage >= 2 * max(m, h * d, f)
    assert p.stage >= 4 * 16 * d  # a page: 16 keys and values
    ring = p.depth(H100) * (p.stage + 16)
    assert p.rest + ring <= H100.max_shared < p.rest + ring + p.stage + 16
    sums, queries = max(8 * 256, 8 * h // g * d) * 4, 8 * d * 2
    assert p.rest == 8 * 4 + 256 * 4 + d * 4 + 8 * 8 * 8 + queries + sums


def test_as_many_stages_as_fit() -> None:
    at = {name: RowPass(*PUBLISHED[name], 16, "bf16").depth(H100) for name in ("Qwen3-4B", "Qwen3-8B")}
    assert at == {"Qwen3-4B": 10, "Qwen3-8B": 8}


@pytest.mark.parametrize(("kv_heads", "parts"), [(1, 32), (3, 32), (5, 16), (8, 16), (9, 8), (132, 1)])
def test_a_power_of_two_of_parts(kv_heads: int, parts: int) -> None:
    assert replace(SERVED, heads=kv_heads, kv_heads=kv_heads).parts(H100) == parts


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_blocks_tell_each_other_has_room(name: str) -> None:
    m, h, g, d, f, v, layers = PUBLISHED[name]
    words, parts, counters, end = RowPass(m, h, g, d, f, v, layers, 16, "bf16").exchange_layout(H100)
    assert words % 16 == parts % 16 == counters % 16 == 0
    assert parts - words >= 4 * (m + (h + 2 * g) * d + h * d + f)  # x, q k v, attention, activations
    assert counters - parts >= 8 * 2 ** int(math.log2(min(32, 132 // g))) * h * (d + 1)
    assert end - counters == 8


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "f16"}, {"head_dim": 256, "heads": 2}, {"head_dim": 32}, {"heads": 18},
        {"feed_forward": 12_296}, {"width": 12_296}, {"heads": 97, "kv_heads": 97, "head_dim": 128},
        {"layers": 81}, {"block_size": 8}, {"block_size": 24}, {"width": 132}, {"feed_forward": 260},
        {"heads": 133, "kv_heads": 133},
    ],
    ids=str,
)  # fmt: skip
def test_other_sizes_are_refused(change: dict[str, Any]) -> None:
    assert SERVED.lacks(H100) is None
    assert replace(SERVED, **change).lacks(H100)


@pytest.mark.parametrize(
    "change", [{"heads": 16}, {"feed_forward": 12_288}, {"width": 12_288}, {"layers": 80}], ids=str
)
def test_the_largest_are_served(change: dict[str, Any]) -> None:
    assert replace(SERVED, **change).lacks(H100) is None


@pytest.mark.parametrize(
    "change",
    [
        {"capability": (8, 0)}, {"capability": (8, 9)}, {"capability": (10, 0)}, {"capability": (12, 0)},
        {"max_shared": 4 * (20 << 10)}, {"num_sms": 1},
    ],
    ids=str,
)  # fmt: skip
def test_other_gpus_are_refused(change: dict[str, Any]) -> None:
    assert SERVED.lacks(replace(H100, **change))


# Steps


class Rig:
    """An executor of the small model on a driver without a GPU."""

    def __init__(
        self, fake: FakeCuda, folder: Path, options: CudaOptions, line: str = "qwen3", form: str = "bf16"
    ) -> None:
        self.fake = fake
        arch = {(9, 0): "90a", (10, 0): "100a"}[fake.capability]
        ctx = CudaContext(kernels=fake_kernels(folder, arch))
        ctx.__dict__["lt"] = FakeLt()
        self.info = ctx.device.info
        table = float32(np.zeros((64, 64)))
        backend = CudaBackend(ctx, {"cos_sin": table}, options, Dummy())
        self.kv = DeviceTensor.empty((8, 2, 2, 2, 16, 64), "bf16", "kv")
        largest = {"T": 8, "R": 2, "L": 2}
        self.executor: CudaExecutor = backend.prepare(program(line, form=form), {"kv": self.kv}, largest)
        backend.load()
        fake.launches.clear()

    def run(self, queries: Sequence[int], logits: int = 1) -> list[Launched]:
        """The launches of a step of rows with so many tokens each."""
        total, rows, i32 = sum(queries), len(queries), np.int32
        inputs = {n: np.arange(3, 3 + total, dtype=i32) for n in ("token_ids", "positions", "kv.places")}
        inputs |= {n: np.array(queries, i32) for n in ("query_lens", "context_lens")}
        inputs |= {
            "query_starts": (np.cumsum(queries) - queries).astype(i32),
            "kv.block_table": np.ones((rows, 4), i32),
            "logit_rows": np.arange(logits, dtype=i32),
        }
        self.fake.launches.clear()
        self.executor.run(inputs, {"T": total, "R": rows, "L": logits})
        return self.fake.launches


def is_pass(launches: list[Launched]) -> bool:
    found = [launch.kernel.startswith("row_pass") for launch in launches]
    assert not any(found) or len(found) == 1
    return any(found)


def test_one_decoded_row_is_one_cooperative_launch(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        rig = Rig(fake, tmp_path, CudaOptions())
        (launch,) = rig.run([1])
        assert (launch.kernel, launch.grid, launch.block) == ("row_pass_bf16_d64", (132, 1, 1), 288)
        assert launch.shared == SERVED.rest + SERVED.depth(rig.info) * (SERVED.stage + 16)
        assert launch.shared <= fake.shared
        assert launch.cooperative and not launch.pdl
        calls = rig.executor.work(ONE, decode_only=True)
        assert [len(work) for _, work in calls] == [1] + [0] * 11


def test_only_that_step_is_one_launch(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        rig = Rig(fake, tmp_path, CudaOptions())
        assert is_pass(rig.run([1]))
        assert not is_pass(rig.run([1, 1], logits=2))
        assert not is_pass(rig.run([2]))
        assert not is_pass(rig.run([1], logits=0))
        assert "row_pass" not in rig.executor.explain(ONE, decode_only=False)
        assert all(not launch.cooperative for launch in fake.launches)


def test_a_graph_of_it_is_one_launch(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        rig = Rig(fake, tmp_path, CudaOptions())
        rig.executor.capture(ONE, decode_only=True)
        assert [launch.captured for launch in fake.launches] == [False, True]
        assert rig.run([1]) == [] and fake.graph_launches == 1


def test_who_looks_between_ops_gets_the_usual_launches(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        rig = Rig(fake, tmp_path, CudaOptions())
        rig.run([1])
        inputs = {n: np.ones(1, np.int32) for n in ("token_ids", "positions", "kv.places", "query_lens")}
        inputs |= {n: np.zeros(1, np.int32) for n in ("query_starts", "logit_rows")}
        inputs |= {"context_lens": np.full(1, 2, np.int32), "kv.block_table": np.ones((1, 4), np.int32)}
        walked = [work for _, work, run in rig.executor.walk(inputs, ONE) if run() is None]
        assert all(walked) and not any("row_pass" in str(w) for work in walked for w in work)


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        assert not is_pass(Rig(fake, tmp_path, CudaOptions(row_pass=False)).run([1]))


def test_another_gpu_gets_the_usual_launches(tmp_path: Path) -> None:
    with fake_cuda(FakeCuda(capability=(10, 0))) as fake:
        assert not is_pass(Rig(fake, tmp_path, CudaOptions()).run([1]))


# What the kernel is given


def parameter(launch: Launched, index: int, nbytes: int) -> bytes:
    return ctypes.string_at((ctypes.c_void_p * (index + 1)).from_address(launch.params)[index] or 0, nbytes)


def ints(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address))


def given(launch: Launched) -> dict[str, Any]:
    """The kernel's arguments by the names that it has for them."""
    values = struct.unpack(packing(PASS.kinds), parameter(launch, 1, PASS.size))
    return {f.name: value for f, value in zip(PASS.fields, values, strict=True)}


def test_sizes_and_addresses_are_where_the_kernel_looks_for_them(tmp_path: Path) -> None:
    with fake_cuda() as fake:
        rig = Rig(fake, tmp_path, CudaOptions())
        (launch,) = rig.run([1])
        args = given(launch)
        numbers = {f.name: args[f.name] for f in PASS.fields if f.kind == "i32"}
        assert numbers == {
            "layers": 2, "m": 128, "h": 4, "g": 2, "f": 256, "v": 512, "block_size": 16,
            "stage": SERVED.stage, "depth": SERVED.depth(rig.info), "window": 2,
        }  # fmt: skip
        assert args["eps"] == pytest.approx(1e-6) and args["scale_log2"] == pytest.approx(
            64**-0.5 / math.log(2)
        )
        for name, value in {
            "token_ids": 3,
            "positions": 3,
            "slots": 3,
            "query_lens": 1,
            "context_lens": 1,
        }.items():
            assert ints(args[name], 1) == [value], name
        assert ints(args["block_table"], 4) == [1] * 4
        outputs = rig.executor.outputs(ONE)
        assert (args["x"], args["logits"]) == (outputs["x"].address, outputs["logits"].address)
        assert args["kv"] == rig.kv.address
        assert int.from_bytes(parameter(launch, 0, 8), "little") == rig.kv.address  # of the TMA descriptor
        weights = {names[0]: t.address for (names, *_), t in rig.executor._weights._held.items()}  # type: ignore[index]
        assert args["embedding"] == args["head"] == weights["embed"]
        assert (args["norm"], args["cos_sin"]) == (weights["norm"], weights["cos_sin"])
        kept = rig.executor._kept["row pass"]
        places = [kept.address + place for place in SERVED.exchange_layout(rig.info)]
        assert [args["words"], args["parts"], args["launches"]] == places[:3]
        assert kept.nbytes >= places[3] - kept.address
        assert not any(ctypes.string_at(kept.address, kept.nbytes))  # no word says that it is there


@pytest.mark.parametrize("form", ["bf16", "fp8_r128"])
@pytest.mark.parametrize("line", ["llama", "qwen3"])
def test_weights_of_every_layer_are_in_the_table(line: str, form: str, tmp_path: Path) -> None:
    with fake_cuda() as fake:
        rig = Rig(fake, tmp_path, CudaOptions(), line, form)
        (launch,) = rig.run([1])
        assert launch.kernel == ("row_pass_bf16_d64" if form == "bf16" else "row_pass_fp8_rows_d64")
        fields = [f.name for f in PASS_LAYER.fields]
        matrices, norms = ["qkv", "o", "gate_up", "down"], ["attn_norm", "q_norm", "k_norm", "mlp_norm"]
        assert fields == [*matrices, *norms, *(f"{name}_scales" for name in matrices)]
        assert set(PASS_LAYER.kinds) == {"ptr"}
        most = module.MAX_LAYERS * len(fields)
        table = np.frombuffer(parameter(launch, 2, 8 * most), np.uint64).reshape(-1, len(fields))
        held = rig.executor._weights._held.items()
        weights = {names[0]: t.address for (names, part, *_), t in held if part != "scales"}  # type: ignore[index]
        scales = {names[0]: t.address for (names, part, *_), t in held if part == "scales"}  # type: ignore[index]
        assert len(scales) == (0 if form == "bf16" else 8)
        for layer in range(2):
            names = [f"layers.{layer}.{n}" for n in ("wq", "wo", "w_gate", "w_down", *norms)]
            want = [*(weights.get(n, 0) for n in names), *(scales.get(n, 0) for n in names[:4])]
            assert table[layer].tolist() == want
        assert (table[:2] != 0).sum() == 2 * (8 if line == "qwen3" else 6) + len(scales)
        assert not table[2:].any()


def test_the_kernels_numbers_are_the_hosts() -> None:
    text = SOURCE.read_text()
    assert f"WARPS = {module.WARPS}, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32" in text
    assert module.THREADS == 32 * (module.WARPS + 1)
    assert f"constexpr int ROUND = {module.ROUND};" in text
