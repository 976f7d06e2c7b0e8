"""`doctor --bisect` of a GPU over a driver that computes nothing: the first op is the first that is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from msgspec import structs

from pegainfer.app.config import EngineConfig
from pegainfer.cli.bisect_cuda import compare
from pegainfer.cli.spec import EngineSpec
from pegainfer.contract.errors import UnsupportedError
from pegainfer.engine.config import SchedulerConfig
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_kernels import FakeLt, write_kernels
from tests.support.tinymodel import write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3

MODEL = TinyQwen3("gpu", seed=5, dtype="bf16", config={"head_dim": 64})
PROMPT = list(range(3, 40))


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    kernels = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr("pegainfer.kernels.load.folders", lambda: (kernels,))
    monkeypatch.setattr("pegainfer.lower.cuda.context.CublasLt", FakeLt)
    folder = write_checkpoint(MODEL, tmp_path / "model")
    engine = EngineConfig(backend="cuda")
    return EngineSpec(name="tiny", path=str(folder), engine=engine, scheduler=SchedulerConfig())


def test_an_op_that_computes_nothing_is_found_in_every_layer_and_step(spec: EngineSpec) -> None:
    with fake_cuda():
        found = compare(spec, PROMPT, 2)
    first = next(d for d in found if not d.error <= 2e-2)
    assert (first.step, first.index, first.layer) == (0, 0, None)
    assert "take_rows" in first.op or "embedding" in first.op
    appended = dict.fromkeys((d.step, d.layer) for d in found if d.operand == "kv")
    layers = range(MODEL.hf_config()["num_hidden_layers"])
    assert list(appended) == [(step, layer) for step in (0, 1) for layer in layers]


def test_dummy_weights_have_nothing_to_be_compared_with(spec: EngineSpec) -> None:
    dummy = structs.replace(spec, engine=dataclasses.replace(spec.engine, load_format="dummy"))
    with pytest.raises(UnsupportedError, match="weights from a file"):
        compare(dummy, PROMPT, 1)
