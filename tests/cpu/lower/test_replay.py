"""The replaying process that tests kernels of other processors, tried where its answers can be checked."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pegainfer.ops.coarse
import pegainfer.ops.sample  # noqa: F401
from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.kernels.cpu.library import LIBRARY
from pegainfer.lower.cpu.backend import CpuOptions
from pegainfer.ops.check import Trial
from pegainfer.ops.embed import GATHER_ROWS
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.spec import REGISTRY
from tests.cpu.kernels.harness import ISAS, check, runner, weights_in
from tests.support.replay import client
from tests.support.replay.client import SOURCE, Replay, replayer


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "replay"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-o", path, SOURCE, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}"], check=True
    )
    return path


@pytest.fixture(scope="module")
def replay(driver: Path) -> Iterator[Replay]:
    replay = Replay([driver])
    yield replay
    replay.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("linear_residual", "q4_1"),
        ("qkv_norm_rope_append", "q8_0"),
        ("lm_head", "bf16"),
        ("expert_gate_up", "q4_0"),
        ("expert_down", "bf16"),
        ("route_experts", ""),
        ("attention", ""),
        ("sample_tokens", ""),
        ("append_tokens", ""),
    ],
)
def test_answers_are_those_of_this_process(isa: str, name: str, dtype: str, replay: Replay) -> None:
    """Outputs, states and operands written in place, bit for bit."""
    options, spec = CpuOptions(threads=2, isa=isa), REGISTRY[name]
    here, there = runner(options), replayer(replay, options)

    def both(trial: Trial) -> None:
        before = {k: a.copy() for k, a in trial.arrays.items()}
        there(trial)
        replayed = {k: a.tobytes() for k, a in trial.arrays.items()}
        for k, a in before.items():
            trial.arrays[k][...] = a
        here(trial)
        assert {k: a.tobytes() for k, a in trial.arrays.items()} == replayed

    arithmetic = "int8" if dtype.startswith("q") else "f32"
    check(spec, both, arithmetic, weights_in(spec, dtype) if dtype else {})
    assert replay.isa == isa


def rows_program(width: int) -> Program:
    b = Builder("one")
    x, rows = b.input("x", "T", width, dtype="f32"), b.input("rows", "L")
    b.emit(GATHER_ROWS, out=b.output("out", "L", width), x=x, rows=rows)
    return b.build()


def test_faults_are_told(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": np.ones((3, 8), np.float32), "rows": np.array([0, 2], np.int32)}
    sizes = {"T": 3, "L": 2}

    def run(isa: str | None = None) -> None:
        replay.run(CpuOptions(threads=1, isa=isa), rows_program(8), {}, {}, inputs, sizes)

    with pytest.raises(OpError, match="no kernels for sse9"):
        run("sse9")
    inputs["rows"][1] = 3
    with pytest.raises(OpError, match=r"rows\[1\]: expected 0 to 2, got 3"):
        run()
    inputs["rows"][1] = 1
    run()
    with monkeypatch.context() as patch:  # an output declared a row too short
        nbytes = client.Tensor.nbytes
        patch.setattr(client.Tensor, "nbytes", lambda t, env: nbytes(t, env) - 32 * (t.name == "out"))
        with pytest.raises(OpError, match="tensor 0: bytes around it were written"):
            run()
    run()


def test_a_process_that_dies_or_is_of_other_sources(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OpError, match="has died; got exit status 7"):
        Replay(["sh", "-c", "exit 7"])
    monkeypatch.setattr(client, "source_hash", lambda: "0" * 64)
    with pytest.raises(UnsupportedError, match="other sources; expected 000000000000"):
        Replay([driver])
