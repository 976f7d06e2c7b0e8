"""The engine's process before it has an order."""

from __future__ import annotations

import os
import signal
import time

import pytest

from pegainfer.cli.engine_child import EngineChild


@pytest.mark.parametrize("moment", [0, 0.02, 0.05, 0.1, 0.2])
def test_ctrl_c_at_any_early_moment_is_the_parents(moment: float, capfd: pytest.CaptureFixture[str]) -> None:
    process = EngineChild().process
    time.sleep(moment)  # somewhere in the child's start, wherever that is
    os.kill(process.pid, signal.SIGINT)
    assert process.stdin is not None
    process.stdin.close()  # no order, as if the parent had ended
    assert process.wait(30) == 0
    assert capfd.readouterr().err == ""
