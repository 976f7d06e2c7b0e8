"""Which kernels latent attention launches, and what it refuses, on a driver without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pegainfer.ops.coarse  # noqa: F401
from pegainfer.contract.errors import UnsupportedError
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.ops.compose import one_call
from pegainfer.ops.mla import HEAD_LINEAR, LATENT_ATTENTION, MLA_ATTENTION, MLA_QKV_APPEND
from pegainfer.ops.spec import OpSpec, Role
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.support.fake_cuda import FakeCuda, fake_cuda, fake_kernels

POOL = {"N": 40, "Y": 2, "S": 16, "W": 64}
ROWS = {**POOL, "H": 16, "D": 576, "K": 512, "F": 192, "X": 128, "A": 128}
QKV = {**POOL, "M": 2048, "H": 16, "F": 192, "A": 3072, "X": 2048, "D": 576, "K": 512, "B": 64, "P": 300}
FLOAT32 = ("norm", "latent_norm", "q_norm", "cos_sin")
A100 = {"num_sms": 108, "capability": (8, 0), "shared": 163 << 10}
L40S = {"num_sms": 142, "capability": (8, 9), "shared": 99 << 10}


def launches(
    folder: Path, spec: OpSpec, sizes: dict[str, int], counts: list[int], dtype: str = "bf16",
    arch: str = "90a", **card: object,
) -> list[tuple[str, tuple[int, int, int]]]:  # fmt: skip
    """Kernel and grid of each launch of one step whose rows have so many tokens."""
    largest = {"T": sum(counts), "R": len(counts)}
    operands = [o for o in spec.operands if o.name not in ("wq_down", "q_norm")]
    stored = {
        o.name: "i32" if o.dtypes == ("i32",) else "f32" if o.name in FLOAT32 else dtype for o in operands
    }
    attrs = {a: 1 if a == "layer" else 1e-6 for a in spec.attrs}
    sizes = sizes | largest
    program = one_call(spec, sizes, stored, attrs)
    inputs = {
        o.name: np.zeros([sizes[a] for a in o.axes], np.int32 if stored[o.name] == "i32" else np.float32)
        for o in operands
        if o.role is Role.IN
    }
    inputs["query_lens"] = inputs["context_lens"] = np.array(counts, np.int32)
    with fake_cuda(FakeCuda(**card)) as fake:
        ctx = CudaContext(kernels=fake_kernels(folder, arch))
        states = {t.name: DeviceTensor.empty(t.sizes({}), t.dtype) for t in program.tensors(Kind.STATE)}
        executor = CudaBackend(ctx, {}, CudaOptions(graphs=False), Dummy()).prepare(program, states, largest)
        executor.run(inputs, largest)
        return [(launch.kernel, launch.grid) for launch in fake.launches]


def kernels(*args: object, **more: object) -> list[str]:
    return [name for name, _ in launches(*args, **more)]  # type: ignore[arg-type]


def test_decoded_rows_are_absorbed_attended_and_expanded_as_they_are_added_up(tmp_path: Path) -> None:
    assert launches(tmp_path, MLA_ATTENTION, ROWS, [1] * 3) == [
        ("attention_plan", (1, 1, 1)),
        ("head_linear_bf16_t16", (16, 1, 16)),
        ("latent_attention_bf16_r16_k64_s3", (24, 1, 1)),  # at most eight parts of 128 keys a row
        ("latent_values_bf16", (2, 1, 16)),
    ]


def test_a_row_alone_is_cut_into_more_parts(tmp_path: Path) -> None:
    found = dict(launches(tmp_path, LATENT_ATTENTION, ROWS, [1], num_sms=132))
    assert found["latent_attention_bf16_r16_k64_s3"] == (16, 1, 1)


EXPANDED = ["mla_expand_bf16", "mla_attend_expanded_bf16"]


def test_rows_of_many_tokens_are_attended_over_expanded_latents(tmp_path: Path) -> None:
    assert kernels(tmp_path, MLA_ATTENTION, ROWS, [1, 300]) == [
        "mla_expand_plan", "attention_plan", "head_linear_bf16_t128", "latent_attention_bf16_r16_k64_s3",
        "attention_merge_decode_bf16_d512", "latent_attention_bf16_r64_k64_s2",
        "attention_merge_prefill_bf16_d512", "head_linear_bf16_t64", *EXPANDED,
        "attention_merge_prefill_bf16_d128",
    ]  # fmt: skip


def test_keys_that_do_not_fit_the_scratch_take_several_rounds(tmp_path: Path) -> None:
    long = ROWS | {"W": 70_000 // 16}  # 252 tiles of 128 keys fit
    found = kernels(tmp_path, MLA_ATTENTION, long, [1, 300])
    assert [name for name in found if name in EXPANDED] == EXPANDED * 3


@pytest.mark.parametrize(("arch", "card"), [("80", A100), ("90a", {})])
def test_cards_before_hopper_and_short_rows_absorb_all_tokens(
    arch: str, card: dict[str, object], tmp_path: Path
) -> None:
    counts = [300] if card else [63]
    assert not set(EXPANDED) & set(kernels(tmp_path, MLA_ATTENTION, ROWS, counts, arch=arch, **card))


def test_many_rows_are_cut_into_a_share_for_each_block(tmp_path: Path) -> None:
    found = dict(launches(tmp_path / "16", LATENT_ATTENTION, ROWS, [1] * 64, num_sms=132))
    assert found["latent_attention_bf16_r16_k64_s3"] == (132, 1, 1)
    # Three blocks, one for each sixteen heads, have the same share.
    found = dict(launches(tmp_path / "40", LATENT_ATTENTION, ROWS | {"H": 40}, [1] * 64, num_sms=131))
    assert found["latent_attention_bf16_r16_k64_s3"] == (129, 1, 1)


def test_rows_of_several_tokens_take_tiles_of_64(tmp_path: Path) -> None:
    assert kernels(tmp_path, LATENT_ATTENTION, ROWS, [1, 33], "f16") == [
        "attention_plan", "latent_attention_f16_r16_k64_s3", "attention_merge_decode_f16_d512",
        "latent_attention_f16_r64_k64_s2", "attention_merge_prefill_f16_d512",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "card", "decode", "prefill"),
    [
        ("80", A100, "r16_k64_s2", "r64_k32_s2"),
        ("89", L40S | {"shared": 99 << 10}, "r16_k32_s2", "r16_k32_s2"),
    ],
)
def test_smaller_cards_have_smaller_stages(
    arch: str, card: dict[str, object], decode: str, prefill: str, tmp_path: Path
) -> None:
    found = kernels(tmp_path, LATENT_ATTENTION, ROWS, [1, 33], arch=arch, **card)
    assert [name for name in found if name.startswith("latent")] == [
        f"latent_attention_bf16_{tile}" for tile in (decode, prefill)
    ]


def test_other_sizes_and_float32_take_kernels_of_any_size(tmp_path: Path) -> None:
    small = ROWS | {"D": 40, "K": 32, "F": 24, "X": 16, "A": 24}
    for sizes, dtype in ((small, "bf16"), (ROWS, "f32")):
        assert set(kernels(tmp_path / dtype, MLA_ATTENTION, sizes, [1, 5], dtype)) <= {
            f"head_linear_any_{dtype}", "head_linear_bf16_t16", f"latent_attention_any_{dtype}",
        }  # fmt: skip


def test_rows_wider_than_any_kernel_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="at most 1024 numbers"):
        launches(tmp_path, LATENT_ATTENTION, ROWS | {"D": 1088, "K": 1024}, [1])


def test_blocks_of_half_a_page_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="multiple of 16 tokens"):
        launches(tmp_path, LATENT_ATTENTION, ROWS | {"S": 8}, [1])


def test_one_gemm_projects_queries_and_latents(tmp_path: Path) -> None:
    found = launches(tmp_path, MLA_QKV_APPEND, QKV, [1] * 4)
    assert [name.split("_bf16")[0] for name, _ in found] == ["rms_norm", "skinny", "mla_finish"]
    assert found[-1][1] == (9, 1, 1)  # 4 tokens of 16 heads and a latent, eight to a block


@pytest.mark.parametrize(
    ("tokens", "n", "tile"), [(1, 512, 16), (64, 512, 64), (64, 128, 16), (1000, 128, 128)]
)
def test_tiles_of_a_heads_matrix_leave_no_half_of_the_device_idle(
    tokens: int, n: int, tile: int, tmp_path: Path
) -> None:
    sizes = {"T": tokens, "H": 16, "N": n, "K": 128, "A": n + 64, "B": 192}
    ((name, grid),) = launches(tmp_path, HEAD_LINEAR, sizes, [tokens])
    rows = {16: 32, 64: 64, 128: 128}[tile]
    assert (name, grid) == (f"head_linear_bf16_t{tile}", (n // rows, -(-tokens // tile), 16))
