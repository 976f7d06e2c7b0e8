"""Which kernel runs for which problem: values that can be printed, the same for the same question."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from pegainfer.kernels.build import find_sources
from pegainfer.lower.cuda.attention_choice import AttentionProblem, choose_attention, lacks_append, refusal
from pegainfer.lower.cuda.gemm import STATIC, GemmProblem, LibraryChoice, StreamChoice, choose_gemm
from pegainfer.lower.cuda.skinny import FILLED, NEVER_MEASURED, SkinnyChoice
from pegainfer.lower.cuda.target import Target, Tuned, Tuning
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.driver import CudaError

H100 = DeviceInfo(0, "H100", (9, 0), 132, 50 << 20, 227 << 10, 228 << 10, 80 << 30, 13000)
L40S = replace(
    H100, name="L40S", capability=(8, 9), num_sms=142, max_shared=99 << 10, shared_per_sm=100 << 10
)
A100 = replace(
    H100, name="A100", capability=(8, 0), num_sms=108, max_shared=163 << 10, shared_per_sm=164 << 10
)
HOPPER, ADA, AMPERE = Target(H100), Target(L40S), Target(A100)
KERNELS = {name for source in find_sources() for name in source.variants}
SHAPES = (
    (6144, 2560),
    (2560, 4096),
    (2560, 9728),
    (576, 1536),
    (960, 576),
    (151_936, 2560),
    (7, 8),
    (5120, 25_600),
)


@pytest.mark.parametrize("target", [ADA, AMPERE], ids=lambda t: t.info.name)
def test_streaming_choices_name_kernels_that_exist_and_fit(target: Target) -> None:
    kinds = (("store", False), ("store", True), ("residual", False), ("swiglu", True), ("storef32", True))
    for (n, k), m, (out, norm), dtype in product(SHAPES, (1, 4, 8, 9, 16), kinds, ("bf16", "f16")):
        choice = choose_gemm(GemmProblem(m, n * 2, k, dtype, out, norm), target)
        if isinstance(choice, LibraryChoice):
            assert "stages fit" in choice.why
            continue
        assert isinstance(choice, StreamChoice)
        assert choice.kernel in KERNELS
        assert choice.shared + STATIC <= target.info.max_shared
        assert choice.splits <= -(-k // 64) and choice.grid[0] >= 1
        assert not (choice.norm and choice.splits > 1)  # a norm needs whole rows


def test_hopper_takes_up_to_64_rows_with_even_shares() -> None:
    kinds = ("store", "residual", "swiglu", "storef32")
    for (n, k), m, out, dtype in product(SHAPES, (1, 8, 9, 17, 33, 64), kinds, ("bf16", "f16")):
        choice = choose_gemm(GemmProblem(m, n * 8, k, dtype, out), HOPPER)
        if not isinstance(choice, SkinnyChoice):
            assert out == "residual" and n * 8 > 132 * 192  # it would take more than one tile a block
            continue
        assert choice.kernel in KERNELS
        assert m <= choice.tokens < max(2 * m, 9)
        assert choice.shared <= H100.max_shared
        across, groups, _ = choice.grid
        assert across == choice.splits and groups == choice.groups
        assert across * groups <= H100.num_sms * FILLED[choice.splits]
        tiles = -(-n * 8 // choice.rows)
        assert choice.rows % 8 == 0 and (choice.splits == 1 or tiles == groups)
        assert choice.sums % 16 == 0 and choice.before % 16 == 0


def test_hopper_takes_up_to_256_rows_with_even_shares() -> None:
    kinds = ("store", "residual", "swiglu", "storef32")
    taken = 0
    for (n, k), m, out, dtype in product(SHAPES, (65, 72, 100, 128, 129, 192, 256), kinds, ("bf16", "f16")):
        choice = choose_gemm(GemmProblem(m, n * 8, k, dtype, out), HOPPER)
        if isinstance(choice, LibraryChoice):
            continue
        assert isinstance(choice, SkinnyChoice)
        assert choice.kernel in KERNELS
        assert m <= choice.tokens <= choice.most_tokens <= choice.threads - 128
        assert choice.shared <= H100.max_shared // (2 if m <= 128 else 1)
        assert choice.groups * choice.splits <= H100.num_sms * FILLED[choice.splits]
        assert -(-n * 8 // choice.rows) == choice.groups
        assert choice.sums % 16 == 0 and choice.before % 16 == 0
        taken += 1
    assert taken > 100


def test_two_hopper_launches_fit_an_sm() -> None:
    for m, (n, k) in product(
        (1, 16, 64, 65, 96, 128), ((6144, 2560), (2560, 4096), (19_456, 2560), (2560, 9728))
    ):
        choice = choose_gemm(GemmProblem(m, n, k, "bf16"), HOPPER)
        assert isinstance(choice, SkinnyChoice)
        assert 2 * (choice.shared + 1024) <= H100.shared_per_sm


def test_products_of_many_rows_go_to_the_library() -> None:
    many = GemmProblem(257, 6144, 2560, "bf16")
    assert str(choose_gemm(many, HOPPER)) == "cublasLt (257 rows: the streaming kernels take 16)"
    assert str(choose_gemm(replace(many, m=17), AMPERE)).startswith("cublasLt (17 rows")
    assert str(choose_gemm(GemmProblem(1, 64, 64, "f32"), HOPPER)).startswith("cublasLt (f32:")
    assert str(choose_gemm(GemmProblem(1, 64, 36, "bf16"), HOPPER)).startswith("cublasLt (k = 36:")


def test_a_choice_explains_itself() -> None:
    problem = GemmProblem(1, 6144, 2560, "bf16", "store", norm=True)
    assert str(problem) == "store rms_norm(x)[1, 2560] · w[6144, 2560]ᵀ bf16"
    assert str(choose_gemm(problem, AMPERE)) == (
        "stream_bf16_norm_store_8: 216 groups x 1 splits, 4 stages, 78912 B (1 rows; 2 blocks an SM)"
    )
    choice = choose_gemm(problem, HOPPER)
    assert str(choice).startswith("skinny_bf16_8_")
    assert choose_gemm(problem, HOPPER) == choice


def test_the_reason_names_the_measurement_or_its_absence() -> None:
    measured = choose_gemm(GemmProblem(16, 6144, 2560, "bf16"), HOPPER)
    assert isinstance(measured, SkinnyChoice)
    assert measured.why == "16 rows; measured on NVIDIA H100 80GB HBM3 up to 16 rows"
    other = choose_gemm(GemmProblem(16, 6144, 2568, "bf16"), HOPPER)
    assert isinstance(other, SkinnyChoice) and other.why.endswith(NEVER_MEASURED)
    library = choose_gemm(GemmProblem(200, 6144, 2560, "bf16"), HOPPER)
    assert str(library).startswith("cublasLt (200 rows: the library was quicker, measured on NVIDIA H100")


def test_a_card_takes_its_own_measurements_before_those_of_its_architecture() -> None:
    def row(card: str, most: int, rows: int, arch: str = "90a") -> Tuned:
        return Tuned(card, arch, "skinny", {"n": 640, "k": 512}, most, {"rows": rows})

    tuning = Tuning((row("H100", 8, 16), row("H200", 8, 24), row("H200", 64, 40), row("A100", 64, 40, "80")))

    def rows(m: int, info: DeviceInfo) -> int:
        choice = choose_gemm(GemmProblem(m, 640, 512, "bf16"), Target(info, tuning=tuning))
        assert isinstance(choice, SkinnyChoice)
        return choice.rows

    assert rows(8, H100) == 16
    assert rows(9, H100) == 32  # beyond what was measured there: even shares
    assert (rows(8, replace(H100, name="H200")), rows(9, replace(H100, name="H200"))) == (24, 40)
    assert rows(9, replace(H100, name="GH200")) == 40


def test_blocks_of_an_sm_follow_from_threads_shared_memory_and_registers() -> None:
    """The occupancy rule of the CUDA programming guide; registers go to warps 256 at a time."""
    target = Target(H100, registers={"small": 32, "large": 168})
    assert target.blocks_per_sm("small", 256, 0) == 8  # 2,048 threads
    assert target.blocks_per_sm("small", 160, 73_728) == 3  # 228 KiB, 1 KiB a block for the system
    assert target.blocks_per_sm("large", 256, 0) == 1  # 8 warps of 5,376 registers, of 65,536
    assert Target(L40S).blocks_per_sm("small", 256, 0) == 6  # 1,536 threads


def test_long_rows_are_split_along_k() -> None:
    choice = choose_gemm(GemmProblem(16, 2560, 9728, "bf16", "residual"), AMPERE)
    assert isinstance(choice, StreamChoice) and choice.splits == 4


ATTENTION = AttentionProblem(64, 8, 32, 8, 128, 16, 256, "bf16", decode_only=False)


def test_attention_kernels_exist_for_every_head_size() -> None:
    for d, dtype, target in product((64, 128, 256), ("bf16", "f16"), (HOPPER, ADA)):
        choice = choose_attention(replace(ATTENTION, head_dim=d, dtype=dtype), target)
        assert {choice.decode, choice.prefill} <= KERNELS
        assert choice.boxes == (target is HOPPER)
        assert f"attention_merge_decode_{dtype}_d{d}" in KERNELS
    assert choose_attention(replace(ATTENTION, decode_only=True), HOPPER).prefill == ""


def test_a_cache_of_eight_bits_has_kernels_of_its_own() -> None:
    """For every head size and card; not those of a row alone and of TMA."""
    for d, target, rows in product((64, 128, 256), (HOPPER, ADA), (1, 8, 64)):
        problem = replace(ATTENTION, rows=rows, head_dim=d, dtype="f8_e4m3")
        choice = choose_attention(problem, target)
        assert choice.decode == f"attention_decode_f8_e4m3_d{d}" and not choice.row
        assert choice.prefill == f"attention_prefill_f8_e4m3_d{d}" and not choice.boxes
        assert {choice.decode, choice.prefill, f"norm_rope_append_f8_e4m3_d{d}"} <= KERNELS
        assert problem.activation == "bf16"
        alone = replace(problem, tokens=rows, decode_only=True)
        assert (lacks_append(alone, target) is None) == (target is HOPPER)
        appending = choose_attention(alone, target, append=True).decode
        assert appending == f"attention_decode_append_f8_e4m3_d{d}" and appending in KERNELS
    assert refusal(replace(ATTENTION, head_dim=96, dtype="f8_e4m3")) is not None


def test_room_for_parts_follows_from_the_longest_row() -> None:
    short = choose_attention(replace(ATTENTION, table_width=8), HOPPER)  # 128 keys: one part
    assert (short.decode_items, short.decode_slots) == (8, 0)
    long = choose_attention(replace(ATTENTION, table_width=4096), HOPPER)
    assert (long.decode_items, long.decode_slots) == (8 * 32, 8 * 32)


def test_one_row_goes_to_all_sms_and_many_are_cut_into_shares() -> None:
    one = replace(ATTENTION, rows=1)
    choice = choose_attention(one, HOPPER)
    assert (choice.row, choice.shares, choice.decode_slots) == (True, 0, 0)
    assert str(choice).startswith("attention_decode_row_bf16_d128 in one block an SM")
    assert choice.decode in KERNELS and not choose_attention(one, ADA).row
    assert not choose_attention(replace(one, kv_heads=16), HOPPER).row
    many = choose_attention(replace(ATTENTION, rows=64), HOPPER)  # three blocks share an SM
    assert (many.row, many.shares) == (False, 3 * 132 // 8)
    assert (many.decode_items, many.decode_slots) == (64 + many.shares, 2 * many.shares)


def test_hopper_appends_in_attention_where_parts_are_few_or_shares_even() -> None:
    def append(rows: int, target: Target = HOPPER, **change: Any) -> bool:
        problem = replace(ATTENTION, tokens=rows, rows=rows, decode_only=True)
        return lacks_append(replace(problem, **change), target) is None

    assert [rows for rows in (1, 2, 8, 9, 16, 17, 128, 129) if append(rows)] == [1, 2, 8, 17, 128]
    assert not append(1, ADA) and not append(1, decode_only=False) and not append(1, tokens=2)
    assert not append(1, dtype="f32") and not append(1, head_dim=96)
    for rows, d, dtype in product((1, 8, 64), (64, 128, 256), ("bf16", "f16")):
        problem = replace(ATTENTION, tokens=rows, rows=rows, decode_only=True, head_dim=d, dtype=dtype)
        choice = choose_attention(problem, HOPPER, append=True)
        assert choice.append and choice.decode in KERNELS and "_append_" in choice.decode
        assert "norm, rotation and append inside" in str(choice)


@pytest.mark.parametrize(
    ("change", "required"),
    [
        ({"head_dim": 96}, "heads of 64, 128, 256"),
        ({"head_dim": 512, "dtype": "f32"}, "heads of at most 256"),
        ({"block_size": 24}, "blocks of a multiple of 16 tokens"),
        ({"dtype": "q8_0"}, "a cache of bf16, f16, f32 or f8_e4m3"),
    ],
)
def test_what_no_kernel_serves_is_refused(change: dict[str, object], required: str) -> None:
    wrong = refusal(replace(ATTENTION, **change))  # type: ignore[arg-type]
    assert wrong is not None and wrong[0] == required
    assert refusal(ATTENTION) is None


def test_a_gpu_without_kernels_is_named() -> None:
    assert H100.arch == "90a" and L40S.arch == "89" and not L40S.pdl
    with pytest.raises(
        CudaError, match=r"V100 has compute capability 7.0; expected 8.0 8.6 8.9 9.0 10.0 12.0"
    ):
        _ = replace(H100, name="V100", capability=(7, 0)).arch
