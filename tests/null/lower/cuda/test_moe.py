"""Which kernels take a mixture of experts, and what they refuse, without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pegainfer.contract.errors import UnsupportedError
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.experts import ExpertChoice, Slots, choose_experts_kernel
from pegainfer.lower.cuda.experts_few import even_rows, takes_few
from pegainfer.lower.cuda.lowering import Step
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.plan import Place, PlannedLaunch
from pegainfer.lower.cuda.planning import plan_program, plan_step, rules
from pegainfer.lower.cuda.target import SYSTEM, Target, card_of
from pegainfer.ops.compose import one_call
from pegainfer.ops.moe import MOE, ROUTE_EXPERTS
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.spec import Role
from pegainfer.ops.tensor import Kind, Tensor
from tests.support.fake_cuda import FakeCuda, fake_cuda, fake_kernels

ATTRS = {"sigmoid": False, "renormalize": True, "groups": 1, "kept_groups": 1, "scale": 1.0}


@pytest.mark.parametrize(
    ("sizes", "attrs", "message"),
    [
        ({"N": 64, "K": 33}, {}, "experts of a token; expected at most 32; got 33"),
        ({"N": 1025, "K": 8}, {}, "experts; expected at most 1024; got 1025"),
        ({"N": 64, "K": 8}, {"groups": 7, "kept_groups": 1}, "groups; expected divisors of 64"),
    ],
)
def test_routing_beyond_the_kernel_is_refused(
    sizes: dict[str, int], attrs: dict[str, int], message: str, tmp_path: Path
) -> None:
    sizes = {"T": 4, **sizes}
    dtypes = {o.name: o.dtypes[0] for o in ROUTE_EXPERTS.operands}
    program = one_call(ROUTE_EXPERTS, sizes, dtypes, ATTRS | attrs)
    with fake_cuda(FakeCuda()):
        backend = CudaBackend(CudaContext(kernels=fake_kernels(tmp_path)), {}, CudaOptions(graphs=False))
        with pytest.raises(UnsupportedError, match=message):
            backend.prepare(program, {}, sizes)


# Experts, experts of a token, widths of the residual stream and of an expert.
MODELS = {"30B-A3B": (128, 8, 2048, 768), "35B-A3B": (256, 8, 2048, 512), "shared": (1, 1, 2048, 512)}
MOE_ATTRS = ATTRS | {"eps": 1e-6}
# Wider than the kernels' registers hold, with more experts or of more for a token.
OTHERS = {
    "wide": (128, 8, 4160, 768),
    "both": (256, 8, 4096, 512),
    "many": (513, 8, 2048, 512),
    "all": (64, 33, 2048, 64),
}


def block(model: str, dtype: str = "bf16") -> list[OpCall]:
    """A block of experts and the addition to the residual stream behind it."""
    n, k, m, f = MODELS[model]
    sizes = {"N": n, "K": k, "M": m, "F": f}
    tensors = {}
    for o in MOE.operands:
        if o.name == "bias":
            continue
        kind = Kind.WEIGHT if o.role is Role.WEIGHT or o.name == "norm" else Kind.BUFFER
        kind = Kind.OUTPUT if o.name == "x" else kind
        stored = {"out": "f32", "norm": "f32", "experts": "i32"}.get(o.name, dtype)
        tensors[o.name] = Tensor(o.name, tuple(sizes.get(a, a) for a in o.axes), stored, kind)
    return [
        OpCall.of(MOE, MOE_ATTRS, **tensors),
        OpCall.of(REDUCE_RESIDUAL, {}, x=tensors["x"], partial=tensors["out"]),
    ]


def launches(
    model: str, tokens: int, arch: str = "90a", attrs: dict[str, int] | None = None
) -> list[PlannedLaunch | object]:
    step = Step(Target(card_of(arch)), {"T": tokens, "R": 1, "L": 1}, False)
    moe, add = block(model)
    moe = replace(moe, attrs={**moe.attrs, **(attrs or {})})
    return list(plan_step([moe, add], step, rules()).launches)


def takes(model: str, attrs: dict[str, int]) -> bool:
    sizes = dict(zip("NKMF", MODELS[model], strict=True), T=8)
    return takes_few(MOE_ATTRS | attrs, sizes, "bf16", card_of("90a"))


def names(found: list[PlannedLaunch | object]) -> list[str]:
    return [p.kernel if isinstance(p, PlannedLaunch) else "library" for p in found]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 2, 8, 32])
def test_a_few_tokens_take_three_launches(tokens: int, model: str) -> None:
    """Norm to residual stream. Hopper has kernels of its own but for many tokens of one expert."""
    for arch in ("80", "86", "100a", "120a", *(["90a"] if model == "shared" and tokens > 8 else [])):
        assert names(launches(model, tokens, arch)) == [
            "route_few", "expert_stream_bf16_swiglu", "expert_stream_bf16_sum"
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "tokens", "tile", "kernels"),
    [
        ("30B-A3B", 9, 8, ("64_128", "64_256")),
        ("30B-A3B", 33, 16, ("64_256", "64_256")),
        ("30B-A3B", 1024, 64, ("64_256", "64_256")),
        ("30B-A3B", 1025, 128, ("128_256", "128_256")),
        ("35B-A3B", 64, 8, ("64_256", "64_256")),
        ("35B-A3B", 2049, 128, ("128_256", "128_256")),
    ],
)
def test_more_tokens_take_the_grouped_gemm_of_hopper(
    model: str, tokens: int, tile: int, kernels: tuple[str, str]
) -> None:
    """`tile`: most slots of a block; `kernels`: slots and rows of a matrix in a tile of each GEMM."""
    found = names(launches(model, tokens))
    assert [name for name in found if name.startswith("expert_")] == [
        f"expert_groups_bf16_{sizes}_{kind}" for sizes, kind in zip(kernels, ("swiglu", "store"), strict=True)
    ]
    assert found[-1] == "sum_experts_bf16"
    n, k, m, f = MODELS[model]
    assert choose_experts_kernel(tokens, k, n, m, f, "bf16", card_of("90a")).tile == tile


@pytest.mark.parametrize(("model", "most"), [("30B-A3B", 4), ("35B-A3B", 8), ("shared", 4)])
def test_up_to_eight_tokens_choose_experts_in_every_block_on_hopper(model: str, most: int) -> None:
    for tokens in (1, 2, 8):
        assert names(launches(model, tokens)) == [
            "router_logits_bf16_1", f"expert_few_bf16_up_4_{most}", f"expert_few_bf16_down_{most}"
        ]  # fmt: skip
    assert "router_logits_bf16_1" not in names(launches(model, 9))


def test_sizes_that_these_kernels_do_not_take_are_routed_by_one_block() -> None:
    """Of widths that are no multiple of 64, or with groups of experts."""
    narrow = OTHERS | {"narrow": (128, 8, 2048, 760)}
    assert takes("30B-A3B", {}) and not takes("30B-A3B", {"groups": 8, "kept_groups": 4})
    assert takes("30B-A3B", {"groups": 8, "kept_groups": 8})
    for model, sizes in narrow.items():
        n, k, m, f = sizes
        assert not takes_few(MOE_ATTRS, {"T": 8, "N": n, "K": k, "M": m, "F": f}, "bf16", card_of("90a")), (
            model
        )
    found = names(launches("30B-A3B", 8, attrs={"groups": 8, "kept_groups": 4}))
    assert found[:2] == ["route_few", "spread_rows_16"]
    assert "sort_slots" in names(launches("30B-A3B", 9))


@pytest.mark.parametrize("model", MODELS)
def test_launches_of_a_few_tokens_share_an_sm(model: str) -> None:
    """So that each fills its ring while the one ahead ends."""
    card = card_of("90a")
    for tokens in (1, 3, 8):
        _, up, down = launches(model, tokens)
        assert isinstance(up, PlannedLaunch) and isinstance(down, PlannedLaunch)
        assert up.shared + down.shared + 2 * SYSTEM <= card.shared_per_sm


@pytest.mark.parametrize(("rows", "best"), [(8 * 1536, 16), (9 * 1024, 8), (2048, 16), (1024, 8)])
def test_tiles_are_as_high_as_even_shares_allow(rows: int, best: int) -> None:
    assert even_rows(rows, card_of("90a")) == best


def test_other_architectures_multiply_on_mma() -> None:
    found = names(launches("30B-A3B", 33, "80"))
    assert {"expert_tiles_bf16_swiglu", "expert_tiles_bf16_store"} <= set(found)


@pytest.mark.parametrize("arch", ["80", "86", "89", "90a", "100a", "120a"])
@pytest.mark.parametrize("model", MODELS)
def test_launches_fit_the_card(model: str, arch: str) -> None:
    card = card_of(arch)
    for tokens in (1, 8, 31, 32, 33, 64, 65, 500, 16384):
        for p in launches(model, tokens, arch):
            assert isinstance(p, PlannedLaunch) or tokens > 8
            if isinstance(p, PlannedLaunch):
                assert p.shared <= card.max_shared and p.grid[1] <= 65535, p


def test_two_streaming_launches_share_an_sm() -> None:
    """So that the second fills its rings while the first one ends."""
    card = card_of("100a")
    for model in MODELS:
        for tokens in (1, 32):
            up, down = launches(model, tokens, "100a")[1:]
            assert isinstance(up, PlannedLaunch) and isinstance(down, PlannedLaunch)
            assert up.shared + down.shared + 2 * SYSTEM <= card.shared_per_sm


@pytest.mark.parametrize("tile", [8, 64, 128])
def test_the_list_of_sorted_slots_has_room_for_any_spread(tile: int) -> None:
    rng = np.random.default_rng(tile)
    place = Place(Tensor("experts", (1,), "i32", Kind.BUFFER))
    choice = ExpertChoice("groups", tile, "bf16", "")
    worst = 0.0
    for _ in range(300):
        slots, experts = int(rng.integers(1, 3000)), int(rng.integers(1, 300))
        # Counts that end a slot behind a full block need the most.
        counts = np.bincount(rng.integers(0, experts, min(slots, experts)), minlength=experts)
        left = slots - int(counts.sum())
        for e in np.flatnonzero(counts):
            more = min(left, tile * int(rng.integers(0, 4)))
            counts[e], left = counts[e] + more, left - more
        counts[int(np.argmax(counts))] += left
        needed = int((-(-counts // tile)).sum())
        room = choice.most_blocks(Slots(slots, 1, experts, place))
        assert needed <= room
        worst = max(worst, needed / room)
    assert worst > 0.9


def test_what_widths_do_not_divide_by_eight_is_left_to_plain_kernels() -> None:
    for m, f, dtype in ((2044, 768, "bf16"), (2048, 764, "bf16"), (2048, 768, "f32")):
        assert choose_experts_kernel(64, 8, 128, m, f, dtype, card_of("90a")).kind == "rows"


def test_float16_is_refused() -> None:
    step = Step(Target(card_of("90a")), {"T": 4, "R": 1, "L": 1}, False)
    with pytest.raises(UnsupportedError, match="expected bf16 or f32"):
        plan_program(Program("halves", tuple(block("30B-A3B", "f16"))), step)


def test_a_sum_that_is_read_again_is_not_added_in_the_launch() -> None:
    calls, step = block("30B-A3B"), Step(Target(card_of("90a")), {"T": 4, "R": 1, "L": 1}, False)
    again = [*calls, OpCall.of(REDUCE_RESIDUAL, {}, x=calls[0].tensors["x"], partial=calls[0].tensors["out"])]
    plan = plan_step(again, step, rules())
    assert "add_experts" not in plan.applied
    assert plan.lacking["add_experts"] == "a sum that only the residual stream reads"
    assert plan_step(calls, step, rules()).applied == {"add_experts": 1}
