"""The engine's process as its parent sees it: started first, and told what to run when that is known.

Python and what every engine imports take it as long as the parent takes to read its command line and to find
the model, some 0.3 s; with `--device cuda` the driver and the GPU's context are opened meanwhile, too.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pegainfer.cli.interrupts import uninterrupted

if TYPE_CHECKING:
    from pegainfer.cli.spec import EngineSpec

DEVICES = ("cpu", "cuda", "reference")  # whose engines import the same


class EngineChild:
    """A process that waits for its order. It ends by itself when its parent does."""

    def __init__(self, device: str = "") -> None:
        """`device`: what it loads meanwhile; '' for nothing."""
        command = [sys.executable, "-m", "pegainfer.cli.engine_process", device]
        # Ctrl-C reaches every process of the terminal: it is held back until the child ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def order(self, socket_path: str, spec: EngineSpec) -> None:
        """What it shall run, and where it shall make its socket. Once."""
        import msgspec

        pipe = self.process.stdin
        assert pipe is not None
        # Where it has ended, whoever connects finds that out. The pipe stays open: its end is our end.
        with contextlib.suppress(BrokenPipeError):
            pipe.write(msgspec.json.encode((socket_path, spec)) + b"\n")
            pipe.flush()


_early: list[EngineChild] = []  # started by `early_child`, not taken yet: one at the most


@contextlib.contextmanager
def early_child(argv: Sequence[str]) -> Iterator[None]:
    """Starts the engine's process for command lines that will want one; ends it if nobody has taken it.

    This process then loads without the garbage collector, whose rounds over what stays take 0.15 s; it is
    switched on with the server (frontend/http/connection/memory.py).
    """
    if argv[:1] != ["serve"] or {"-h", "--help"} & set(argv):
        yield
        return
    gc.disable()
    try:
        _early.append(EngineChild(_device(argv)))
        yield
    finally:
        gc.enable()
        with uninterrupted():
            while _early:
                child = _early.pop()
                child.process.kill()  # it has no engine yet, and may be deep in a driver's call
                child.process.wait()


def take_child() -> EngineChild:
    """The process that was started early, or a new one."""
    return _early.pop() if _early else EngineChild()


def _device(argv: Sequence[str]) -> str:
    """Which device's engine to load for, before anybody has checked the flags: a guess costs only time."""
    named = [a.removeprefix("--device=") for a in argv if a.startswith("--device=")]
    named += [value for flag, value in itertools.pairwise(argv) if flag == "--device"]
    device = named[-1] if named else os.environ.get("PEGAINFER_DEVICE", "cpu")
    if device == "cuda" and any(a.startswith("--device-ordinal") for a in argv):
        return "cpu"  # the GPU is opened when its number is known
    return device if device in DEVICES else ""
