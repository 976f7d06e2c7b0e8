"""`doctor --bisect` on tiny models: silent where the device is right, and exact about where it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.app import load
from pegainfer.app.config import EngineConfig
from pegainfer.cli.bisect import Difference, compare, relative_error
from pegainfer.cli.spec import EngineSpec
from pegainfer.engine.config import SchedulerConfig
from pegainfer.ops.backend import Backend
from pegainfer.runtime.weights.weight import Weight, float32
from tests.support.tinymodel import MODELS, write_checkpoint

PROMPT = list(range(3, 40))


def spec(folder: Path) -> EngineSpec:
    write_checkpoint(MODELS["tied_f32"], folder)
    config = EngineConfig(threads=2, activation="f32")
    return EngineSpec(name="tiny", path=str(folder), engine=config, scheduler=SchedulerConfig())


def first_beyond(found: list[Difference], bound: float) -> Difference | None:
    return next((d for d in found if not d.error <= bound), None)


def test_a_right_device_differs_nowhere(tmp_path: Path) -> None:
    found = compare(spec(tmp_path), PROMPT, 4)
    assert {d.step for d in found if d.program == "llama"} == {0, 1, 2, 3}
    assert {d.op for d in found} >= {"embedding", "attention", "linear_residual", "lm_head", "sample_tokens"}
    assert first_beyond(found, 1e-5) is None


@pytest.mark.parametrize(
    ("weight", "op", "operand"),
    [
        ("layers.1.wk", "attention", "out"),  # keys are seen when they are read
        ("layers.1.w_down", "linear_residual", "x"),
        ("layers.0.mlp_norm", "gate_up_swiglu", "out"),
    ],
)
def test_a_wrong_weight_is_found_at_its_op_and_layer(
    weight: str, op: str, operand: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampered(tensors: dict[str, Weight], config: EngineConfig) -> tuple[Backend, str]:
        scaled = float32(tensors[weight].values() * np.float32(1.5))
        return load.make_backend({**tensors, weight: scaled}, config)

    monkeypatch.setattr("pegainfer.cli.bisect.make_backend", tampered)
    found = first_beyond(compare(spec(tmp_path), PROMPT, 2), 1e-3)
    assert found is not None
    assert (found.step, found.op, found.operand) == (0, op, operand)
    assert found.layer in (int(weight.split(".")[1]), None)


def test_relative_error() -> None:
    want = np.array([1.0, -4.0, np.inf], np.float32)
    assert relative_error(np.array([1.0, -3.0, np.inf], np.float32), want) == 0.25
    assert relative_error(np.array([1.0, np.nan, np.inf], np.float32), want) == np.inf
    assert relative_error(want, want) == 0.0
    assert relative_error(np.array([1, 2]), np.array([1, 3])) == np.inf
    assert relative_error(np.empty(0), np.empty(0)) == 0.0
