"""Plans made without a driver are what an executor binds, and name every kernel that a model can launch."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.cli.kernels import model_kernels
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kernels.manifest import Manifest, read_manifest
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.lowering import Step
from pegainfer.lower.cuda.plan import PlannedLaunch, StepPlan
from pegainfer.lower.cuda.planning import plan_program
from pegainfer.lower.cuda.target import Target, card_of, declared_kernels
from pegainfer.runner.buckets import Bucket
from pegainfer.runner.cuda import CudaRunner
from pegainfer.runtime.cuda.launch import Launch
from tests.support.fake_cuda import FakeCuda, FakeLt, fake_cuda, fake_kernels
from tests.support.launch_lists import CARDS, Case, executor, recorded

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": {
            "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "linear_num_key_heads": 16, "linear_num_value_heads": 16, "vocab_size": 4096,
            "max_position_embeddings": 4096, "tie_word_embeddings": True,
        },
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 1024,
        "intermediate_size": 3072, "moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1], "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def planned(plan: StepPlan) -> list[object]:
    return [
        (p.kernel, p.grid, p.block, p.shared) if isinstance(p, PlannedLaunch) else str(p.problem)
        for p in plan.launches
    ]


def bound(work: list[Any]) -> list[object]:
    return [
        (w.kernel.name, w.grid, w.block, w.shared) if isinstance(w, Launch) else str(w.plan.problem)
        for w in work
    ]


@pytest.mark.parametrize("model", ["Qwen3-4B", "Qwen3-8B", "SmolLM2-135M"])
@pytest.mark.parametrize("arch", ["90a", "89"])
def test_a_plan_without_a_driver_is_what_is_bound(model: str, arch: str, tmp_path: Path) -> None:
    case = Case(model, arch, layers=2)
    target = Target(card_of(arch))
    with fake_cuda(FakeCuda(memory=1 << 40, **CARDS[arch])):
        ctx = CudaContext(kernels=fake_kernels(tmp_path, arch))
        ctx.__dict__["lt"] = FakeLt()
        made = executor(case, ctx)
        for tokens, rows in ((1, 1), (2, 2), (8, 8), (17, 17), (64, 64), (160, 160), (5, 1), (512, 8)):
            env, decode = {"T": tokens, "R": rows, "L": rows}, tokens == rows
            made.capture(env, decode, graph=False)
            plan = plan_program(recorded(case), Step(target, env, decode))
            assert planned(plan) == bound(made.launches(env, decode)), env


def test_every_architecture_has_a_card() -> None:
    for arch in ("80", "86", "89", "90a", "100a", "120a"):
        card = card_of(arch)
        assert card.arch == arch and (card.clusters > 0) == (arch == "90a")


@pytest.mark.parametrize(
    ("line", "lora", "kv"),
    [*product(CONFIGS, (False, True), ("auto",)), ("qwen3_5", True, "fp8")],
)
def test_a_models_kernels_are_all_that_serving_it_loads(
    line: str, lora: bool, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of them alone: every size is captured, which loads its kernels."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[line]))
    kernels = model_kernels(str(tmp_path), ["90a"])["90a"]
    assert kernels <= set(declared_kernels()) and len(kernels) < len(declared_kernels()) / 2
    (folder,) = fake_kernels(tmp_path / "cubins")
    whole = read_manifest(folder / "90a")
    assert whole is not None
    units = (replace(u, variants=tuple(v for v in u.variants if v.name in kernels)) for u in whole.units)
    Manifest("90a", whole.compiler, tuple(u for u in units if u.variants)).write(folder / "90a")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (folder,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    with fake_cuda(FakeCuda(memory=1 << 40)):
        config = EngineConfig(
            backend="cuda", load_format="dummy", kv_cache_memory=1 << 28, enable_lora=lora, kv_dtype=kv
        )  # fmt: skip
        runner = build_engine(tmp_path, line, config, SchedulerConfig()).runner
        assert isinstance(runner, CudaRunner)
        for bucket in (*runner._sizes.buckets.all(), *(Bucket(n, n, True) for n in (3, 100, 200))):
            runner._parts.forward.capture(bucket.env, bucket.decode, graph=False)
        for size in (1, 64, 256):
            runner._parts.sampler.capture({"L": size, "J": 0, "E": 0, "U": 0, "O": 0}, False, graph=False)
        runner.close()
