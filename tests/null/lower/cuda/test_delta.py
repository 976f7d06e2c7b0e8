"""Which kernels the recurrent ops launch, and what they refuse, on a driver without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import UnsupportedError
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy
from pegainfer.ops.compose import one_call
from pegainfer.ops.delta import CAUSAL_CONV_SILU, GATED_DELTA_RULE
from pegainfer.ops.gated_delta import GATED_DELTA
from pegainfer.ops.spec import OpSpec, Role
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.support.fake_cuda import FakeCuda, fake_cuda, fake_kernels

POOL = {"N": 8, "Y": 2}
HEADS = {"F": 2 * 2 * 128 + 4 * 128, "H": 4, "K": 128, "V": 128, **POOL}
CONV = {"F": 1024, "X": 3, "W": 4, **POOL}
LAYER = {**HEADS, **CONV, "A": 4 * 128, "M": 256}
FLOAT32 = ("delta", "a_log", "dt_bias", "taps", "norm", "out_norm")


def launches(
    folder: Path, spec: OpSpec, sizes: dict[str, int], counts: list[int], dtypes: dict[str, str] | None = None
) -> list[tuple[str, tuple[int, int, int]]]:
    """Kernel and grid of each launch of one step whose rows have so many tokens, in bf16."""
    largest = {"T": sum(counts), "R": len(counts)}
    stored = {
        o.name: "i32" if o.dtypes == ("i32",) else "f32" if o.name in FLOAT32 else "bf16"
        for o in spec.operands
    } | (dtypes or {})
    attrs = {a: {"layer": 1, "tiled": False}.get(a, 1e-6) for a in spec.attrs}
    sizes = sizes | largest
    program = one_call(spec, sizes, stored, attrs)
    inputs = {
        o.name: np.zeros([sizes[a] for a in o.axes], np.int32 if stored[o.name] == "i32" else np.float32)
        for o in spec.operands
        if o.role is Role.IN
    }
    inputs["query_lens"] = inputs["context_lens"] = np.array(counts, np.int32)
    with fake_cuda(FakeCuda()) as fake:
        ctx = CudaContext(kernels=fake_kernels(folder))
        states = {t.name: DeviceTensor.empty(t.sizes({}), t.dtype) for t in program.tensors(Kind.STATE)}
        executor = CudaBackend(ctx, {}, CudaOptions(graphs=False), Dummy()).prepare(program, states, largest)
        executor.run(inputs, largest)
        return [(launch.kernel, launch.grid) for launch in fake.launches]


def test_rows_of_one_token_read_and_write_each_state_once(tmp_path: Path) -> None:
    assert launches(tmp_path, GATED_DELTA_RULE, HEADS, [1, 1, 1]) == [("delta_step_bf16", (4, 4, 3))]


def test_longer_rows_of_bf16_go_by_chunks(tmp_path: Path) -> None:
    assert launches(tmp_path, GATED_DELTA_RULE, HEADS, [1, 70]) == [
        ("delta_step_bf16", (4, 4, 2)),
        ("delta_chunk_prepare_bf16", (3, 2, 1)),  # (chunks at most, key heads)
        ("delta_chunk_scan_bf16", (4, 4, 2)),
    ]


def test_longer_rows_of_float32_go_token_by_token(tmp_path: Path) -> None:
    dtypes = dict.fromkeys(("qkv", "a", "b", "out"), "f32")
    assert launches(tmp_path, GATED_DELTA_RULE, HEADS, [1, 70], dtypes) == [
        ("delta_step_f32", (4, 4, 2)),
        ("delta_sequence_f32", (4, 4, 2)),
    ]


def test_states_of_bf16_have_kernels_of_their_own(tmp_path: Path) -> None:
    narrow = {"delta": "bf16"}
    assert [k for k, _ in launches(tmp_path / "rows", GATED_DELTA_RULE, HEADS, [1, 70], narrow)] == [
        "delta_step_bf16_bf16",
        "delta_chunk_prepare_bf16",
        "delta_chunk_scan_bf16_bf16",
    ]
    assert kernels_of_layer(tmp_path / "decode", {}, [1, 1], **narrow)[-1] == "delta_decode_bf16_bf16"


@pytest.mark.parametrize(
    ("sizes", "dtypes"),
    [({"K": 64, "F": 2 * 2 * 64 + 4 * 128}, {}), ({}, dict.fromkeys(("qkv", "a", "b", "out"), "f32"))],
    ids=["other heads", "float32"],
)
def test_states_of_bf16_are_refused(sizes: dict[str, int], dtypes: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"dtype of delta; expected f32; bf16 with .*; got bf16"):
        launches(tmp_path, GATED_DELTA_RULE, HEADS | sizes, [3], dtypes | {"delta": "bf16"})


def test_blocks_take_several_chunks_and_rows_where_there_are_many(tmp_path: Path) -> None:
    """A step of many decode rows starts no block for each of them: about 8 blocks an SM at most."""
    (_, (_, _, rows)), (_, (chunks, _, _)), (_, (_, _, at_once)) = launches(
        tmp_path, GATED_DELTA_RULE, HEADS, [1] * 400 + [2000] * 8
    )
    assert (rows, chunks, at_once) == (408, 528, 66)


@pytest.mark.parametrize(("key_dim", "value_dim", "across"), [(64, 128, 4), (128, 48, 2)])
def test_other_heads_take_the_kernel_of_any_size(
    key_dim: int, value_dim: int, across: int, tmp_path: Path
) -> None:
    sizes = HEADS | {"K": key_dim, "V": value_dim, "F": 2 * 2 * key_dim + 4 * value_dim}
    assert launches(tmp_path, GATED_DELTA_RULE, sizes, [3]) == [("delta_any_bf16", (across, 4, 1))]


@pytest.mark.parametrize(
    ("counts", "sizes", "kernel", "grid"),
    [
        ([1, 1, 1], {}, "causal_conv4_bf16", (1, 3, 1)),
        ([1, 64, 65], {}, "causal_conv4_bf16", (1, 19, 1)),  # 18 tiles in use: 1, 8 and 9
        ([2], {"X": 2, "W": 3}, "causal_conv_bf16", (8, 1, 1)),
        ([2], {"F": 1028}, "causal_conv_bf16", (9, 1, 1)),
    ],
)
def test_convolution(
    counts: list[int], sizes: dict[str, int], kernel: str, grid: tuple[int, int, int], tmp_path: Path
) -> None:
    assert launches(tmp_path, CAUSAL_CONV_SILU, CONV | sizes, counts) == [(kernel, grid)]


def test_mixed_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="dtype of conv; expected bf16; got f32"):
        launches(tmp_path / "conv", CAUSAL_CONV_SILU, CONV, [1], {"conv": "f32"})
    with pytest.raises(UnsupportedError, match="dtype of out; expected bf16; got f32"):
        launches(tmp_path / "delta", GATED_DELTA_RULE, HEADS, [1], {"out": "f32"})


def kernels_of_layer(folder: Path, sizes: dict[str, int], counts: list[int], **dtypes: str) -> list[str]:
    return [kernel for kernel, _ in launches(folder, GATED_DELTA, LAYER | sizes, counts, dtypes)]


def test_rows_of_one_token_take_one_launch_behind_the_projections(tmp_path: Path) -> None:
    *projection, (kernel, grid) = launches(tmp_path, GATED_DELTA, LAYER, [1, 1, 1])
    assert (kernel, grid) == ("delta_decode_bf16", (12, 1, 1))  # value heads of all rows
    assert [k.split("_")[0] for k, _ in projection] == ["rms", "skinny"]


def test_many_rows_on_hopper_claim_their_heads_from_a_ring(tmp_path: Path) -> None:
    sms, heads = 132, 32
    sizes = LAYER | {"H": heads, "A": heads * 128, "F": 2 * 2 * 128 + heads * 128}
    rows = 5 * sms // heads + 1
    *_, (kernel, grid) = launches(tmp_path / "ring", GATED_DELTA, sizes, [1] * rows)
    assert (kernel, grid) == ("delta_decode_ring_bf16", (sms, 1, 1))
    assert kernels_of_layer(tmp_path / "few", sizes, [1] * (rows - 1))[-1] == "delta_decode_bf16"
    narrow = kernels_of_layer(tmp_path / "narrow", sizes, [1] * rows, delta="bf16")
    assert narrow[-1] == "delta_decode_bf16_bf16"


def test_longer_rows_take_the_parts_behind_one_projection(tmp_path: Path) -> None:
    assert kernels_of_layer(tmp_path, {}, [1, 70])[2:] == [
        "causal_conv4_bf16", "delta_step_bf16", "delta_chunk_prepare_bf16", "delta_chunk_scan_bf16",
        "gated_rms_norm_bf16",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sizes",
    [{"V": 64, "A": 256, "F": 512 + 256}, {"K": 64, "F": 256 + 512}, {"X": 2, "W": 3}],
    ids=["value heads", "key heads", "taps"],
)
def test_sizes_that_the_one_launch_is_not_made_for_take_the_parts(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    found = kernels_of_layer(tmp_path, sizes, [1, 1])
    assert not any("decode" in kernel for kernel in found)
    assert [kernel.split("_")[0] for kernel in found[-3:]] == ["causal", "delta", "gated"]


def test_rows_that_vectors_cannot_read_are_projected_one_by_one(tmp_path: Path) -> None:
    """Two value heads leave rows of 4 gates more than a multiple of 8."""
    sizes = {"H": 2, "A": 256, "F": 2 * 2 * 128 + 2 * 128}
    found = kernels_of_layer(tmp_path, sizes, [1])
    assert sum(kernel.startswith(("skinny", "stream")) for kernel in found) == 4
