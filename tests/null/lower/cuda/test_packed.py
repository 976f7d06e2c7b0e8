"""Quantised weights on a GPU: which stay packed, which kernels multiply by them, how they are loaded."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import OpError
from pegainfer.kernels.build import find_sources
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.gemm import GemmProblem, choose_gemm
from pegainfer.lower.cuda.lowering import Step, keeps_whole
from pegainfer.lower.cuda.packed import CELL, MOST_ROWS, STATIC, ExpandChoice, PackedChoice
from pegainfer.lower.cuda.plan import Matrix, Packed, Place, PlannedLaunch, StepPlan, Struct
from pegainfer.lower.cuda.planning import chosen_kernels, plan_step, rules
from pegainfer.lower.cuda.store import Dummy, WeightStore
from pegainfer.lower.cuda.target import Target, card_of
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.forward import forward, groups
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.program import Program
from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.arguments import PACK
from pegainfer.runtime.cuda.layout import packing
from pegainfer.runtime.cuda.packed import FORMS, OF_FORMAT
from pegainfer.runtime.weights.weight import Weight, plain
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels

KERNELS = {name for source in find_sources() for name in source.variants}
TARGETS = {arch: Target(card_of(arch)) for arch in ("80", "89", "90a", "100a", "120a")}
STEPS = Formats("bf16", "bf16", "bf16")
CONFIG = Qwen3Config(
    vocab_size=1000, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, max_position_embeddings=512,
    tie_word_embeddings=True,
)  # fmt: skip


def program(**formats: str) -> Program:
    """Qwen3's forward. `formats`: of weights by the last part of their names; the others have q4_1."""
    return recorded(STEPS, formats)


def recorded(steps: Formats, formats: dict[str, str]) -> Program:
    stored = {
        name: formats.get(name.rpartition(".")[2], "q4_1") if len(shape) > 1 else "f32"
        for name, shape in TABLE.shapes(CONFIG).items()
    }
    return forward(CONFIG, stored, Sizes(groups(CONFIG, 16, steps), (8,), 64), steps)


def planned(p: Program, tokens: int, arch: str = "90a", **options: bool) -> StepPlan:
    env = {"T": tokens, "R": tokens, "L": tokens}
    calls = p.lowered(keep=keeps_whole).calls
    return plan_step(calls, Step(TARGETS[arch], env, True), rules(**options))


def held(plan: StepPlan, kind: type) -> set[tuple[str, ...]]:
    """Names of the weights that the launches read in this way."""
    found = set()
    for launch in plan.launches:
        args = launch.args if isinstance(launch, PlannedLaunch) else ()
        values = [
            v for a in args for v in (a.values if isinstance(a, Struct) else (getattr(a, "value", None),))
        ]
        places = [v for v in values if isinstance(v, Place)]
        places += [p for p in (getattr(a, "place", None) for a in args) if p is not None]
        places += [] if isinstance(launch, PlannedLaunch) else [launch.w]
        found |= {tuple(t.name for t in p.held.tensors) for p in places if isinstance(p.held, kind)}
    return found


@pytest.mark.parametrize("arch", TARGETS)
def test_choices_name_kernels_that_exist_and_fit(arch: str) -> None:
    target = TARGETS[arch]
    shapes = ((6144, 2560), (2560, 9728), (151_936, 2560), (7, 32), (960, 576), (200, 25_600))
    for (n, k), m, form in product(shapes, (1, 8, 9, 17, MOST_ROWS), FORMS):
        choice = choose_gemm(GemmProblem(m, n, k, "bf16", form=form), target)
        assert isinstance(choice, PackedChoice)
        assert choice.kernel in KERNELS and choice.depth >= 3
        assert choice.shared + STATIC <= target.info.max_shared
        assert choice.token_blocks * choice.tokens >= m and choice.chunks * 128 >= k
        assert choice.cells == choice.token_blocks * -(-n // CELL)
        assert 1 <= choice.blocks <= choice.cells * choice.chunks


def test_many_rows_expand_the_weight_but_the_largest() -> None:
    problem = GemmProblem(MOST_ROWS + 1, 6144, 2560, "bf16", form="int8_g32")
    assert isinstance(choose_gemm(problem, TARGETS["90a"]), ExpandChoice)
    head = choose_gemm(replace(problem, n=151_936), TARGETS["90a"])
    assert isinstance(head, PackedChoice) and head.token_blocks == 1


@pytest.mark.parametrize("tokens", [1, 16, MOST_ROWS, 300])
def test_no_weight_of_a_quantised_model_is_expanded_when_it_is_loaded(tokens: int) -> None:
    plan = planned(program(), tokens)
    assert not held(plan, Matrix)
    assert len(held(plan, Packed)) == 4 * CONFIG.num_layers + 1  # the table is embedding and head
    assert plan.applied.get("fold_norm", 0) == (2 * CONFIG.num_layers - 1 if tokens <= MOST_ROWS else 0)


def test_the_pass_in_one_launch_serves_no_packed_weight() -> None:
    plan = planned(program(), 1)
    assert "decode_pass" not in plan.applied
    assert plan.lacking["decode_pass"] == "weights of 16 or 8 bits, not packed ones"
    assert planned(program(**dict.fromkeys(("embed", "wq"), "bf16")), 1).lacking["decode_pass"]


def test_pairs_that_differ_in_form_and_formats_without_one_are_expanded() -> None:
    plan = planned(program(w_gate="q8_0", w_down="q3_k"), 8)
    expanded = {name.rpartition(".")[2] for names in held(plan, Matrix) for name in names}
    assert expanded == {"w_gate", "w_up", "w_down"}


@pytest.mark.parametrize("tokens", [1, MOST_ROWS, 300])
def test_heads_of_several_forms_are_a_product_each(tokens: int) -> None:
    """What a Q4_K_M file has: it keeps the values' projection in more bits."""
    plan = planned(program(wv="q6_k"), tokens)
    parts = {tuple(name.rpartition(".")[2] for name in names) for names in held(plan, Packed)}
    assert {("wq", "wk"), ("wv",)} <= parts and not held(plan, Matrix)
    heads = [call for call in plan.calls if call[0].spec.name.endswith(("project_heads", "rope_append"))]
    assert len(heads) == CONFIG.num_layers
    for call, launches in heads:
        kernels = [launch.kernel for launch in launches if isinstance(launch, PlannedLaunch)]
        products = [k for k in kernels if k.startswith(("packed_int4_pair", "packed_int8_g16"))]
        expanded = [k for k in kernels if k.startswith("expand")]
        assert (len(products), len(expanded)) == ((2, 0) if tokens <= MOST_ROWS else (0, 2)), call.spec.name


def test_activations_of_other_dtypes_have_no_packed_weights() -> None:
    steps = Formats("f32", "f32", "f32")
    assert not held(planned(recorded(steps, {}), 4), Packed)


def test_a_build_of_the_model_compiles_what_packs_its_weights() -> None:
    step = Step(TARGETS["90a"], {"T": 8, "R": 8, "L": 8}, True)
    assert {"pack_q4_1", "take_int4_pair", "packed_int4_pair_8"} <= chosen_kernels(program(), [step])


def test_every_format_has_a_form_and_its_kernels() -> None:
    for name, form in OF_FORMAT.items():
        assert f"pack_{name}" in KERNELS
        assert {f"{kind}_{form.name}" for kind in ("make_up", "expand", "take")} <= KERNELS
        assert form.tile_bytes % 16 == 0


# Loading


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    with fake_cuda() as driver:
        yield driver


def tensor(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(name, shape, dtype, Kind.WEIGHT)


def test_rows_arrive_in_order_and_whole(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch gets the bytes of its rows, and says where they go."""
    monkeypatch.setattr("pegainfer.lower.cuda.packing.SLOT_BYTES", 3000)
    ctx, form = CudaContext(), OF_FORMAT["q4_0"]
    values = np.random.default_rng(0).standard_normal((50, 256)).astype(np.float32)
    weights = {name: quantized_weight("q4_0", values + i) for i, name in enumerate("ab")}
    narrow = tensor("c", (50, 128), "q4_0")
    weights["c"] = quantized_weight("q4_0", values[:, :128])
    store = WeightStore(ctx, weights)
    pair = tensor("a", (50, 256), "q4_0"), tensor("b", (50, 256), "q4_0")
    sent: list[tuple[int, int, int, int, bytes]] = []

    def launch(config: Any, kernel: str, params: int, _: int) -> None:
        assert kernel == "pack_q4_0"
        members = struct_of(params)
        data = ctypes.string_at(members["in"], members["rows"] * members["row_bytes"])
        sent.append((members["pairs"], members["first"], members["row"], members["rows"], data))

    rows, pairs = store.packed(pair, form, "rows"), store.packed(pair, form, "pairs")
    assert rows.nbytes == form.nbytes(100, 256) and pairs.nbytes == form.nbytes(112, 256)
    watch(fake, launch, monkeypatch)
    store.load()
    for layout, begins in ((0, (0, 50)), (1, (0, 1))):
        for name, first in zip("ab", begins, strict=True):
            pieces = sorted(p[2:] for p in sent if p[:2] == (layout, first))
            assert [p[0] for p in pieces] == list(range(0, 50, pieces[0][1]))
            stored = weights[name].parts["values"].bytes().tobytes()
            assert b"".join(p[2] for p in pieces) == stored
    with pytest.raises(OpError, match="do not fit into one"):
        store.packed((pair[0], narrow), form, "rows")


def test_weights_without_data_are_made_up(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = CudaContext()
    store = WeightStore(ctx, {"a": Weight(plain("q8_0"), (40, 64), {})}, Dummy())
    store.packed((tensor("a", (40, 64), "q8_0"),), OF_FORMAT["q8_0"], "rows")
    seen: list[str] = []
    watch(fake, lambda config, kernel, params, _: seen.append(kernel), monkeypatch)
    store.load()
    assert seen == ["make_up_int8_g32"]


def watch(fake: FakeCuda, look: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `look` at every launch."""
    launch = fake.cuLaunchKernelEx

    def watched(config: Any, function: Any, params: int, extra: int) -> Any:
        look(config, str(function), params, extra)
        return launch(config, function, params, extra)

    monkeypatch.setattr(fake, "cuLaunchKernelEx", watched, raising=False)


def struct_of(params: int) -> dict[str, int]:
    """The members of a launch's one argument, a packed::PackArgs."""
    address = ctypes.c_uint64.from_address(params).value
    form = packing(PACK.kinds)
    found = struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))
    return dict(zip((f.name for f in PACK.fields), found, strict=True))


def test_a_gemm_of_an_expanded_weight_starts_when_the_expansion_has_ended() -> None:
    """GEMMs read their weights before griddepcontrol.wait."""
    for tokens in (MOST_ROWS + 1, 200):
        plan = planned(program(), tokens, arch="100a")
        launches = list(plan.launches)
        behind = [
            b for a, b in pairwise(launches) if isinstance(a, PlannedLaunch) and a.kernel.startswith("expand")
        ]
        assert behind and not any(isinstance(b, PlannedLaunch) and b.pdl for b in behind)
