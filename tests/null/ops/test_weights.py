"""Plans of loading: experts in every form that files have, shards that read their own bytes, clear errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError, OpError, UnsupportedError
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.store import WeightStore
from pegainfer.ops.quantize import quantize
from pegainfer.ops.ranks import TensorRank
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.ops.weights import InFile, WeightTable, entry, in_layer, plan_weights, without_data
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.part import Extent
from pegainfer.runtime.weights.safetensors import SafetensorsFile
from pegainfer.runtime.weights.tensorfile import MappedFile
from pegainfer.runtime.weights.weight import Weight
from tests.support.expertfiles import FUSED, INTERLEAVED, SINGLE, Config, values, write_checkpoint, write_gguf
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels
from tests.support.modelfiles import safetensors_file
from tests.support.schemes import awq, fp8_blocks, seeded, stored_parts

CONFIG = Config()
TABLES = {"single": SINGLE, "fused": FUSED, "interleaved": INTERLEAVED}
DTYPES = {"f32": "F32", "f16": "F16", "i32": "I32", "f8_e4m3": "F8_E4M3"}


def equal(weights: Mapping[str, Weight], wanted: Mapping[str, np.ndarray[Any, Any]]) -> None:
    assert list(weights) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(weights[name].values(), array, err_msg=name)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_experts_of_a_checkpoint(table: WeightTable, tmp_path: Path) -> None:
    path = write_checkpoint(table, CONFIG, tmp_path / "m.safetensors")
    with SafetensorsFile(path) as file:
        weights = plan_weights(table, CONFIG, file, "hf")
        assert weights["layers.0.e_gate"].shape == (4, 32, 64)
        assert "layers.1.e_gate" not in weights and weights["layers.1.w_gate"].shape == (96, 64)
        equal(weights, values(CONFIG))


@pytest.mark.parametrize("form", ["bf16", "q8_0", "q4_0"])
def test_experts_of_gguf(form: str, tmp_path: Path) -> None:
    with GGUFFile(write_gguf(CONFIG, tmp_path / "m.gguf", form)) as file:
        weights = plan_weights(SINGLE, CONFIG, file, "gguf")
        assert {w.dtype for n, w in weights.items() if "e_" in n} == {form}
        wanted = {
            name: dequantize(form, quantize(form, a), a.shape) if a.ndim > 1 and "router" not in name else a
            for name, a in values(CONFIG).items()
        }
        equal(weights, wanted)


class Reads:
    """Byte ranges that were read of files, in place of mapping them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[int, int]] = []
        monkeypatch.setattr(MappedFile, "read", self._read)
        monkeypatch.setattr(MappedFile, "view", lambda _: pytest.fail("only what is needed is to be read"))

    def _read(self, extent: Extent, into: np.ndarray[Any, Any]) -> None:
        source = extent.source
        assert isinstance(source, MappedFile)
        data = source.path.read_bytes()
        for i in range(extent.rows):
            start = extent.offset + i * extent.pitch
            self.found.append((start, start + extent.width))
            row = np.frombuffer(data, np.uint8, extent.width, start)
            into[i * extent.width : (i + 1) * extent.width] = row

    def bytes_read(self) -> list[int]:
        """How often each byte was read, from the first one on."""
        counts = np.zeros(max(stop for _, stop in self.found), np.int64)
        for start, stop in self.found:
            counts[start:stop] += 1
        return counts.tolist()


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaContext]:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    with fake_cuda():
        yield CudaContext()


def loaded(ctx: CudaContext, weights: Mapping[str, Weight]) -> dict[str, np.ndarray[Any, Any]]:
    """Every matrix as a GPU has it."""
    store = WeightStore(ctx, weights)
    held = {
        name: store.matrix((Tensor(name, w.shape, w.dtype, Kind.WEIGHT),), w.dtype, "rows")
        for name, w in weights.items()
        if len(w.shape) > 1
    }
    store.load()
    return {name: t.numpy(ctx.stream) for name, t in held.items()}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_shard_reads_its_own_bytes(
    table: WeightTable, ctx: CudaContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of a divided weight is read by one rank, once; what every rank needs by each of them."""
    ranks, axes = 2, {"wq": 0, "wo": 1, "e_gate": 0, "e_up": 0, "e_down": 0}
    axes |= {"w_gate": 0, "w_up": 0, "w_down": 1, "lm_head": 0}
    with SafetensorsFile(write_checkpoint(table, CONFIG, tmp_path / "m.safetensors")) as file:
        reads = Reads(monkeypatch)
        parts = []
        for rank in range(ranks):
            weights = plan_weights(table, CONFIG, file, "hf", at=TensorRank(rank, ranks))
            assert weights["embed"].shard is None and weights["lm_head"].shard == (0, rank, ranks)
            matrices = {name: w for name, w in weights.items() if len(w.shape) > 1}
            before = len(reads.found)
            parts.append(loaded(ctx, matrices))
            read = sum(stop - start for start, stop in reads.found[before:])
            assert read == sum(p.nbytes for w in matrices.values() for p in w.parts.values())
        wanted = {name: a for name, a in values(CONFIG).items() if a.ndim > 1}
        for name, whole in wanted.items():
            axis = axes.get(name.rpartition(".")[2])
            got = parts[0][name] if axis is None else np.concatenate([p[name] for p in parts], axis)
            np.testing.assert_array_equal(got, whole, err_msg=name)
        counts = reads.bytes_read()
        for t in file.tensors.values():
            if len(t.shape) > 1:
                shared = "embed" in t.name or t.name.endswith("mlp.gate.weight")
                assert set(counts[t.offset : t.offset + t.nbytes]) == {ranks if shared else 1}, t.name


QUANTISED = WeightTable(
    line="quantised",
    embed=entry("embed", "embed.weight", "", ("vocab_size", "hidden_size")),
    others=(),
    head=entry("lm_head", "lm_head.weight", "", ("vocab_size", "hidden_size")),
    layer=(in_layer("w", "proj", "", ("intermediate_size", "hidden_size"), shard=0),),
)


@pytest.mark.parametrize("scheme", [fp8_blocks(16, 32), awq(32)], ids=["fp8", "awq"])
def test_parts_of_a_quantised_checkpoint_are_found_by_their_suffixes(scheme: Any, tmp_path: Path) -> None:
    config = Config(num_layers=1, tie_word_embeddings=True)
    shape = (config.intermediate_size, config.hidden_size)
    tensors = {"embed.weight": ("BF16", (40, 64), bytes(40 * 64 * 2))}
    for p in scheme.parts:
        form, array = stored_parts(scheme, shape, 0)[p.name]
        tensors[f"model.layers.0.proj{p.suffix}"] = DTYPES[form], array.shape, array.tobytes()
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_file(tensors))
    with SafetensorsFile(path) as file:

        def plan(**more: TensorRank) -> Weight:
            chosen = lambda name: scheme if "proj" in name else None  # noqa: E731
            return plan_weights(QUANTISED, config, file, "hf", scheme_of=chosen, **more)["layers.0.w"]

        want = seeded(scheme, shape, 0).values()
        np.testing.assert_array_equal(plan().values(), want)
        assert plan().dtype == scheme.name
        np.testing.assert_array_equal(plan(at=TensorRank(1, 3)).values(), want[32:64])
        with pytest.raises(OpError, match=f"slice of axis 0 of a {scheme.name} weight"):
            plan(at=TensorRank(0, 32))


def test_axes_of_one_entry_do_not_matter(tmp_path: Path) -> None:
    """A depthwise convolution is stored as [channels, 1, taps], a gate as [1, hidden]."""
    table = WeightTable(
        line="conv",
        embed=entry("embed", "embed.weight", "", ("vocab_size", "hidden_size")),
        others=(entry("conv", "conv.weight", "", ("q_size", "num_experts")),),
        head=entry("gate", "gate.weight", "", ("hidden_size",)),
        layer=(),
    )
    shapes = {"embed.weight": (40, 64), "conv.weight": (32, 1, 4), "gate.weight": (1, 64)}
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_file({n: ("F32", a.shape, a.tobytes()) for n, a in arrays.items()}))
    with SafetensorsFile(path) as file:
        weights = plan_weights(table, CONFIG, file, "hf")
        np.testing.assert_array_equal(weights["conv"].values(), arrays["conv.weight"][:, 0])
        np.testing.assert_array_equal(weights["gate"].values(), arrays["gate.weight"][0])


def test_what_is_ignored_is_named_by_patterns(tmp_path: Path) -> None:
    extra = np.zeros((2, 2), np.float32)
    names = {"model.visual.blocks.0.w": extra, "mtp.fc.weight": extra}
    with SafetensorsFile(write_checkpoint(SINGLE, CONFIG, tmp_path / "m.safetensors", **names)) as file:
        assert plan_weights(SINGLE, CONFIG, file, "hf", ignored=["model.visual.*", "mtp.*"])
        with pytest.raises(UnsupportedError, match=r"the moe line does not use; .* got mtp.fc.weight;"):
            plan_weights(SINGLE, CONFIG, file, "hf", ignored=["model.visual.*"])


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    with SafetensorsFile(write_checkpoint(SINGLE, CONFIG, tmp_path / "m.safetensors")) as file:
        name = "model.layers.0.mlp.experts.4.gate_proj.weight and 5 more"
        with pytest.raises(ModelFileError, match=f"tensors are missing; expected {name}"):
            plan_weights(SINGLE, Config(num_experts=5), file, "hf")


def test_a_misshapen_stack_is_named(tmp_path: Path) -> None:
    with SafetensorsFile(write_checkpoint(FUSED, CONFIG, tmp_path / "m.safetensors")) as file:
        wanted = r"\[4, 48, 64\] = \[num_experts, gate_up_size, hidden_size\]; got \[4, 64, 64\]"
        with pytest.raises(ModelFileError, match=f"experts.gate_up_proj contradicts .* expected {wanted}"):
            plan_weights(FUSED, Config(expert_size=24), file, "hf")


def test_names_of_a_stack() -> None:
    stored = InFile("layers.{}.experts.{expert}.w")
    assert stored.names(3, 2) == ["layers.3.experts.0.w", "layers.3.experts.1.w"]
    assert InFile("layers.{}.w").names(3, 2) == ["layers.3.w"]


def test_weights_without_data_have_the_shapes_alone() -> None:
    made = without_data(SINGLE, CONFIG)
    assert {n: w.shape for n, w in made.items()} == SINGLE.shapes(CONFIG)
    assert not any(w.parts for w in made.values())
    assert (made["norm"].dtype, made["layers.0.e_up"].dtype) == ("f32", "bf16")
