"""Ctrl-C three times, at any moment of a server's life: it ends, and prints no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.server import CLI, LISTENING

END_SECONDS = 60.0
# 0 and 1: after a drain, clean or not. 130: while it started. By the signal: as the interpreter itself ended.
CODES = {0, 1, 130, -signal.SIGINT}


def interrupt(process: subprocess.Popen[str], gap: float) -> None:
    """As a terminal does: every process of the group gets it."""
    for _ in range(3):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(gap)


@pytest.mark.parametrize("gap", [0.0, 0.02, 0.15], ids=["at once", "quick", "slow"])
@pytest.mark.parametrize("moment", [0.3, 0.5, None], ids=["early", "loading", "serving"])
def test_three_interrupts_leave_no_traceback(moment: float | None, gap: float) -> None:
    process = subprocess.Popen(
        [*CLI, "serve", "--device", "null", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if moment is not None:
            time.sleep(moment)  # wherever in its start that is
        while moment is None and not process.stdout.readline().startswith(LISTENING):
            assert process.poll() is None
        interrupt(process, gap)
        _, errors = process.communicate(timeout=END_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert "Traceback" not in errors and "Exception" not in errors
    assert process.returncode in CODES


def test_an_interrupt_that_nothing_can_catch_ends_the_process() -> None:
    program = (
        "from pegainfer.cli.interrupts import quieten_interrupts\n"
        "quieten_interrupts()\n"
        "class Callback:\n"
        "    def __del__(self): raise KeyboardInterrupt\n"
        "del_it = Callback(); del del_it\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
