"""`doctor --bisect` on a GPU: silent where it is right, exact about where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.config import EngineConfig
from pegainfer.cli.bisect import Difference
from pegainfer.cli.bisect_cuda import compare
from pegainfer.cli.doctor import BISECT_BOUNDS
from pegainfer.cli.spec import EngineSpec
from pegainfer.engine.config import SchedulerConfig
from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.runtime.weights.weight import Weight
from tests.gpu.harness import raw
from tests.support.default_model import default_model
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3

MODEL = TinyQwen3("gpu", seed=5, dtype="bf16", config={"head_dim": 64, "num_hidden_layers": 3})
PROMPT = list(range(3, 40))


def spec(path: Path) -> EngineSpec:
    engine = EngineConfig(backend="cuda")
    return EngineSpec(name="m", path=str(path), engine=engine, scheduler=SchedulerConfig())


def first_wrong(found: list[Difference]) -> Difference | None:
    return next((d for d in found if not d.error <= BISECT_BOUNDS["cuda"]), None)


def test_a_right_gpu_differs_nowhere(ctx: CudaContext, tmp_path: Path) -> None:
    found = compare(spec(write_checkpoint(MODEL, tmp_path)), PROMPT, 4)
    assert {d.step for d in found} == {0, 1, 2, 3}
    assert {d.layer for d in found} >= {0, 1, 2}
    assert first_wrong(found) is None


def test_the_default_model_differs_nowhere(ctx: CudaContext) -> None:
    assert first_wrong(compare(spec(default_model()), PROMPT, 2)) is None


@pytest.mark.parametrize(
    ("weight", "operand"), [("layers.1.wv", "kv"), ("layers.2.w_down", "x"), ("layers.0.mlp_norm", "out")]
)
def test_a_wrong_weight_is_found_at_its_layer(
    weight: str, operand: str, ctx: CudaContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampered(ctx: CudaContext, weights: Mapping[str, Weight], options: CudaOptions) -> CudaBackend:
        right = weights[weight]
        wrong = raw(right.values() * np.float32(1.5), right.scheme.name)
        return CudaBackend(ctx, {**weights, weight: wrong}, options)

    monkeypatch.setattr("pegainfer.cli.bisect_cuda.CudaBackend", tampered)
    wrong = first_wrong(compare(spec(write_checkpoint(MODEL, tmp_path)), PROMPT, 1))
    assert wrong is not None
    assert (wrong.step, wrong.layer, wrong.operand) == (0, int(weight.split(".")[1]), operand), str(wrong)
