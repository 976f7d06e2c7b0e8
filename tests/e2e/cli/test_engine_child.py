"""The engine's process before it has an order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pegainfer.app.config import EngineConfig
from pegainfer.cli.engine_child import EngineChild
from pegainfer.cli.spec import EngineSpec
from pegainfer.engine.config import SchedulerConfig


@pytest.mark.parametrize("moment", [0, 0.02, 0.05, 0.1, 0.2])
def test_ctrl_c_at_any_early_moment_is_the_parents(moment: float, capfd: pytest.CaptureFixture[str]) -> None:
    process = EngineChild().process
    time.sleep(moment)  # somewhere in the child's start, wherever that is
    os.kill(process.pid, signal.SIGINT)
    assert process.stdin is not None
    process.stdin.close()  # no order, as if the parent had ended
    assert process.wait(30) == 0
    assert capfd.readouterr().err == ""


def test_an_engine_to_which_nobody_connected_ends_after_its_parent(tmp_path: Path) -> None:
    spec = EngineSpec(name="null", path="", engine=EngineConfig(), scheduler=SchedulerConfig())
    child = EngineChild()
    child.order(str(tmp_path / "engine.sock"), spec)
    assert child.process.stdin is not None
    child.process.stdin.close()  # as if the parent had been killed
    assert child.process.wait(40) == 1  # it would wait a minute for the front


def test_an_order_that_was_cut_off_is_none() -> None:
    process = EngineChild().process
    process.communicate(b'["engine.sock", {"name": "nu', 30)
    assert process.returncode == 0
