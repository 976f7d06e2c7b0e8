"""What `make kernels` has compiled, seen without a GPU: every kernel of every served line, by architecture.

The programs themselves run in tests/gpu.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kernels.build import find_sources, stale_units
from pegainfer.kernels.manifest import Manifest, Unit, Variant, read_manifest
from pegainfer.lower.cuda.attention_choice import AttentionProblem, fit_sm
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.target import Target, card_of
from pegainfer.runner.cuda import CudaRunner
from pegainfer.runtime.cuda.launch import Launch
from pegainfer.runtime.cuda.packed import FORMS
from tests.support.cubin_files import architecture
from tests.support.fake_cuda import FakeCuda, FakeLt, fake_cuda

FOLDER = Path(__file__).parents[2] / "build" / "cubins"  # Makefile: kernels
# A card of each: compute capability, multiprocessors, shared memory of a block.
CARDS = {
    "80": ((8, 0), 108, 163 << 10),
    "86": ((8, 6), 84, 99 << 10),
    "89": ((8, 9), 142, 99 << 10),
    "90a": ((9, 0), 132, 227 << 10),
    "100a": ((10, 0), 148, 227 << 10),
    "120a": ((12, 0), 188, 99 << 10),
}
ARCHS = ("90a", "120a")  # that must be there; others are looked at where they are
# Bytes that a kernel may spill, stores and loads; none where it is not named. Tiles of heads of 256 want more
# registers than a thread has, and no line that is served has such heads; sample_pick's blocks of 1,024
# threads have 64 registers each, which sm_120a's compiler overruns (sm_90a's does not); row_pass keeps some
# numbers of a pass there, outside of its loops over rows; latent attention with three stages of 64 keys does
# not fit a block of sm_120a, whose compiler overruns its registers. Packed GEMMs of 64 tokens hold 64 sums
# beside their operands, and two blocks of an SM leave 128 registers. Decode attention that appends to pages
# of 8 bits holds the new token beside its sums. Sums and gathers over ranks wait for memory of other GPUs.
# The delta rule in float32 is for checking. Down projections of a few tokens' experts keep some addresses
# there, outside of their loops. sm_120a's compiler overruns the registers of the chunked scan's preparation.
SPILLS = {
    "attention_prefill_bf16_d256": 108,
    "attention_prefill_f16_d256": 108,
    "sample_pick": 112,
    "row_pass_bf16_d128": 20,
    "row_pass_fp8_rows_d64": 408,
    "row_pass_fp8_rows_d128": 536,
    "latent_attention_bf16_r16_k64_s3": 24,
    "latent_attention_f16_r16_k64_s3": 24,
    **{f"packed_{form}_64": 176 for form in FORMS},
    "packed_int8_g32_32": 32,
    "attention_decode_append_f8_e4m3_d128": 188,
    "gather_ranks": 72,
    **dict.fromkeys((f"sum_ranks_tagged_{dtype}" for dtype in ("bf16", "f16", "f32")), 20),
    "delta_decode_f32": 16,
    **dict.fromkeys((f"delta_chunk_prepare_{dtype}" for dtype in ("bf16", "f16")), 40),
    "expert_few_bf16_down_4": 20,
    "expert_few_bf16_down_8": 12,
    "expert_few_bf16_down_16": 12,
}
REGISTERS, STATIC = 64 << 10, 48 << 10  # of a multiprocessor; bytes that a kernel may declare
LINES: dict[str, dict[str, Any]] = {  # widths are the models' own, layers and vocabulary are not
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 4096, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
        "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip
DECODES, PREFILLS = (1, 8, 9, 16, 17, 64, 65, 256), ((1, 16), (1, 512), (8, 2048))  # rows; rows and tokens


@dataclass(frozen=True)
class Compiled:
    folder: Path
    manifest: Manifest

    def read(self, unit: Unit) -> bytes:
        return (self.folder / unit.cubin).read_bytes()

    @property
    def kernels(self) -> dict[str, Variant]:
        return {v.name: v for u in self.manifest.units for v in u.variants}


@pytest.fixture(scope="module", params=[a for a in CARDS if a in ARCHS or (FOLDER / a).is_dir()])
def arch(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not FOLDER.is_dir():
        pytest.skip(f"nothing is compiled in {FOLDER}: make kernels")
    return name


@pytest.fixture(scope="module")
def compiled(arch: str) -> Compiled:
    manifest = read_manifest(FOLDER / arch)
    assert manifest is not None and manifest.arch == arch
    return Compiled(FOLDER / arch, manifest)


def test_every_source_was_compiled_as_it_stands(arch: str, compiled: Compiled) -> None:
    assert stale_units(compiled.manifest) == []
    declared = {name for s in find_sources() if s.serves(arch) for name in s.variants}
    assert set(compiled.kernels) == declared


def test_each_file_holds_its_kernels_for_its_architecture(arch: str, compiled: Compiled) -> None:
    for unit in compiled.manifest.units:
        data = compiled.read(unit)
        assert architecture(data) == int(arch.rstrip("a")), unit.cubin
        missing = [v.name for v in unit.variants if v.name.encode() + b"\0" not in data]
        assert not missing, unit.cubin


def test_no_kernel_needs_more_than_declared(compiled: Compiled) -> None:
    spills = {v.name: v.spills for v in compiled.kernels.values() if v.spills > SPILLS.get(v.name, 0)}
    large = {v.name: v.shared for v in compiled.kernels.values() if v.shared > STATIC}
    assert (spills, large) == ({}, {})


def test_plans_without_compiled_kernels_count_the_same_blocks_an_sm(arch: str, compiled: Compiled) -> None:
    """Then registers come from cards.json, for the kernels whose grid is as many blocks as fit the device."""
    known, unknown = Target.of(card_of(arch), compiled.manifest), Target(card_of(arch))
    count = 0
    for name, kernel in compiled.kernels.items():
        f = {k: int(v) for k, v in kernel.features.items() if v.isdigit()}
        if not name.startswith("attention_") or not {"ring", "shared"} & set(f):
            continue
        for group in range(1, 9):
            outputs = (f["block"] // 32 - 1) * group * f["head"] * 4 if "ring" in f else 0
            block = f["block"], f.get("ring", f.get("shared", 0)) + outputs
            count += 1
            assert known.blocks_per_sm(name, *block) == unknown.blocks_per_sm(name, *block), name
    assert count >= 8 * 18


@pytest.fixture(scope="module")
def card(arch: str) -> Iterator[FakeCuda]:
    """A driver that computes nothing and shows a card of this architecture."""
    capability, sms, shared = CARDS[arch]
    with fake_cuda(FakeCuda(capability, sms, shared=shared, memory=1 << 36)) as fake:
        yield fake


@pytest.mark.parametrize("line", list(LINES))
def test_all_of_a_lines_steps_have_kernels(
    line: str, arch: str, compiled: Compiled, card: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lowers steps of every size to launches: what was not compiled, or does not fit the card, is refused."""
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (FOLDER,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    (tmp_path / "config.json").write_text(json.dumps(LINES[line]))
    config = EngineConfig(backend="cuda", load_format="dummy", max_model_len=4096, kv_cache_memory=1 << 28)
    runner = build_engine(tmp_path, line, config, SchedulerConfig(max_slots=256)).runner
    assert isinstance(runner, CudaRunner)
    seen: set[str] = set()
    for executor in (runner._parts.forward, runner._parts.sampler, runner._parts.prompt_logprobs):
        for launch in launches(executor):
            kernel = compiled.kernels[launch.kernel.name]
            assert launch.shared + kernel.shared <= CARDS[arch][2], launch
            assert launch.block * -(-kernel.registers // 8) * 8 <= REGISTERS, launch
            seen.add(kernel.name)
    runner.close()
    assert {name for name in seen if name.startswith("attention_decode_bf16")}
    assert {"take_rows_16", "append_tokens", "sample_pick"} <= seen


def launches(executor: CudaExecutor) -> Iterator[Launch]:
    """Of steps of all sizes; products by cuBLASLt have none."""
    none = dict.fromkeys("JEUO", 1)
    steps = [({"T": n, "R": n, "L": n} | none, True) for n in DECODES]
    steps += [({"T": tokens, "R": rows, "L": rows} | none, False) for rows, tokens in PREFILLS]
    for env, decode_only in steps:
        for _, work in executor.work(env, decode_only):
            yield from (w for w in work if isinstance(w, Launch))


@pytest.mark.parametrize("arch", ARCHS)
def test_plans_without_a_gpu_know_which_kernels_lack_registers(arch: str) -> None:
    manifest = read_manifest(FOLDER / arch)
    compiled, packaged = Target.of(card_of(arch), manifest), Target(card_of(arch))
    checked = 0
    for v in (v for unit in manifest.units for v in unit.variants):
        if not v.name.startswith("attention_") or not {"ring", "shared"} & set(v.features):
            continue
        for group in (1, 4, 8):
            p = AttentionProblem(
                8, 8, 2 * group, 2, int(v.features["head"]), 16, 64, v.features["dtype"], True
            )
            assert fit_sm(p, packaged, v.name) == fit_sm(p, compiled, v.name), (v.name, group)
            checked += 1
    assert checked >= 18
