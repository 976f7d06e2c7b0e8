"""What a plain start imports: a feature that nobody has asked for costs every server its time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tests.support.default_model import default_model
from tests.support.server import CLI, LISTENING

# Modules and packages of features that are off, and of other models and devices.
OFF = (
    "app.gpu", "app.kv_events", "app.peers", "app.ranks", "app.tier_stores", "bench", "cli.fleet",
    "engine.peers", "frontend.grammar.cfg", "frontend.http.fleet", "frontend.tools.field_syntax",
    "frontend.tools.python_syntax", "kernels.build", "kv.device.disk", "kv.device.transfers", "kv.events",
    "kv.exports", "kv.moves", "kv.tiers", "lower.cuda", "measure", "models.deepseek_v2", "models.qwen3",
    "models.qwen3_5", "models.qwen3_moe", "null", "ops.adapters", "ops.fused", "ops.quantize_on_load",
    "parallel", "peers", "runner.adapters", "runner.cuda", "runtime.cuda.driver", "runtime.rank_memory",
    "runtime.weights.adapter", "runtime.weights.checkpoints", "runtime.weights.fp8_checkpoints",
    "runtime.weights.peft", "simulate",
)  # fmt: skip
OTHERS = {"numpy.random", "numpy.typing", "opentelemetry", "pydantic", "yaml"}
MOST_FRONT, MOST_ENGINE = 200, 190  # modules of this package in each process
# Classes that stay dataclasses: their fields have flags, or it is one object with work in its making.
DATACLASSES = {"EngineConfig", "SchedulerConfig", "ModelFlags", "HttpConfig", "FleetFlags", "Front"}

ENGINE = """
import sys
from pathlib import Path
from pegainfer.cli import engine_process
from pegainfer.cli.spec import EngineSpec, build
from pegainfer.app.config import EngineConfig
from pegainfer.engine.config import SchedulerConfig
engine_process._load("cpu")
spec = EngineSpec(name="m", path=sys.argv[1], engine=EngineConfig(), scheduler=SchedulerConfig())
build(spec).runner.close()
print(*sys.modules, sep="\\n")
"""
RECORDS = """
import sys
from pegainfer.cli import engine_process
from pegainfer.cli.commands import build_app
engine_process._load("cpu")
build_app("serve")
import pegainfer.cli.serving, pegainfer.frontend.http.app, pegainfer.app.text, pegainfer.lower.cpu.backend
for name, module in list(sys.modules.items()):
    if name.startswith("pegainfer."):
        for c in vars(module).values():
            if isinstance(c, type) and c.__module__ == name and "__dataclass_fields__" in vars(c):
                print(c.__name__)
"""


def engine_modules() -> set[str]:
    """What an engine's process has imported once the default model is loaded."""
    command = [sys.executable, "-c", ENGINE, str(default_model())]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def front_modules() -> set[str]:
    """What the HTTP process of a server has imported once it listens; its engine reports nothing."""
    command = [sys.executable, "-X", "importtime", *CLI[1:], "serve", str(default_model()), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        reading = threading.Thread(target=_end_when_it_listens, args=(process,))
        reading.start()
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        reading.join()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


def _end_when_it_listens(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(LISTENING):
            process.terminate()


@pytest.mark.parametrize(
    ("modules", "used", "most"),
    [
        (engine_modules, ("engine.loop", "models.llama.engine", "lower.cpu.backend"), MOST_ENGINE),
        (front_modules, ("cli.serving", "frontend.http.app", "frontend.tokenizer"), MOST_FRONT),
    ],
)
def test_a_plain_start_imports_nothing_for_features_that_are_off(
    modules: Callable[[], set[str]], used: tuple[str, ...], most: int
) -> None:
    imported = modules()
    ours = {name.removeprefix("pegainfer.") for name in imported if name.startswith("pegainfer.")}
    assert set(used) <= ours
    assert not {name for name in ours for off in OFF if name == off or name.startswith(off + ".")}
    assert not OTHERS & imported
    assert len(ours) <= most, "import what only a feature needs in the function that turns it on"


def test_records_of_the_start_are_structs() -> None:
    """A dataclass of eight fields takes a millisecond to make, a struct of msgspec's 0.015."""
    done = subprocess.run([sys.executable, "-c", RECORDS], capture_output=True, text=True, check=True)
    assert "Front" in done.stdout
    assert set(done.stdout.split()) - DATACLASSES == set()
