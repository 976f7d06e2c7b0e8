"""The engine's process: `python -m pegainfer.cli.engine_process DEVICE`, started by cli/engine_child.py.

It loads what DEVICE needs, then reads its order from standard input: a line of JSON, a socket's path and an
EngineSpec. Its parent holds the other end open for as long as it lives. How it ends: 0 when the front has
hung up, asked for it or given no order, 1 where the engine failed or the parent is gone, 2 where the user can
cure it; why is told through the socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pegainfer.cli.spec import LOG_FORMAT, EngineSpec, build, make_grammars
from pegainfer.contract.errors import EXIT_FAILED, PegaError

if TYPE_CHECKING:
    from pegainfer.app.assemble import Engine
    from pegainfer.contract.handle import EngineInfo
    from pegainfer.contract.step import Runner
    from pegainfer.measure.profile import Profiler

ORPHAN_SECONDS = 5.0  # for what an orderly end takes


def main(device: str) -> int:
    """Runs one engine and returns the exit code.

    Args:
        device: whose engine to load before the order comes; '': none.
    """
    # Ctrl-C reaches every process of the terminal; what it means is decided by the front.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    gc.disable()  # until all is built, which stays: it would be looked at again and again (serve_engine)
    faulthandler.enable()  # a crash in a kernel leaves the stack of every thread on standard error
    if device == "cuda":
        _start_warm_up(0)
    if device:
        _load(device)
    order = sys.stdin.buffer.readline()
    if not order.endswith(b"\n"):
        return 0  # the parent has ended
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    socket_path, spec = msgspec.json.decode(order, type=tuple[str, EngineSpec])
    if spec.engine.backend == "cuda" and device != "cuda":
        _start_warm_up(spec.engine.device_ordinal)
    # Not on a GPU: threads that its engine starts while it loads would keep the low priority.
    gentle = spec.gentle and spec.engine.backend != "cuda"
    if gentle:
        from pegainfer.runtime.priority import at_low_priority

        at_low_priority(partial(_load, spec.engine.backend))
    from pegainfer.engine.process import serve_engine

    op_times = None
    if spec.time_ops and spec.engine.backend == "cpu" and not spec.is_null:
        from pegainfer.measure.op_times import OpTimes

        op_times = OpTimes()
    engine: Engine

    def start() -> tuple[Runner, EngineInfo]:
        nonlocal engine
        building = partial(_build, spec, op_times)
        engine = at_low_priority(building) if gentle else building()
        return engine.runner, engine.info

    return serve_engine(
        start,
        socket_path,
        spec.scheduler,
        make_policy=lambda _, config: engine.policy(config),
        grammars=lambda info: make_grammars(spec, info),
        op_times=op_times,
        peers=lambda: engine.peers,
    )


def _load(device: str) -> None:
    """Imports what an engine on this device needs, before it is known what it shall run."""
    modules = ["pegainfer.engine.process", "pegainfer.app.assemble", "pegainfer.app.grammars"]
    if device == "cuda":
        modules += ["pegainfer.app.gpu", "pegainfer.lower.cuda.backend", "pegainfer.runner.resident"]
        modules += ["pegainfer.runner.cuda"]
    # The simplest line brings what all lines share; what another one has besides takes it some 10 ms later.
    for name in (*modules, "pegainfer.models.llama.engine"):
        importlib.import_module(name)


def _end_with_parent(pipe: int) -> None:
    """Ends this process after its parent, where it has not ended by itself.

    It does when the front's socket closes; but not before a front has connected, nor in a call to a driver
    that never returns, and all that time it would hold the GPU's memory.
    """
    while os.read(pipe, 1):
        pass
    time.sleep(ORPHAN_SECONDS)
    os._exit(EXIT_FAILED)


def _start_warm_up(ordinal: int) -> None:
    threading.Thread(target=_warm_up, args=(ordinal,), daemon=True).start()


def _warm_up(ordinal: int) -> None:
    """Beside the imports, what the driver and cuBLASLt do once in a process; it waits, so it costs nothing.

    What is wrong shows when the GPU is opened for use.
    """
    with contextlib.suppress(PegaError):
        from pegainfer.runtime.cuda.device import Device

        Device.open(ordinal)  # stays open: the next one finds the context there
        from pegainfer.runtime.cuda.cublaslt import warm_up

        warm_up()


def _build(spec: EngineSpec, profiler: Profiler | None) -> Engine:
    """The engine, with the time that its imports took among the phases."""
    started = time.perf_counter()
    engine = build(spec, profiler)
    phases = dict(engine.info.startup_seconds)
    imports = time.perf_counter() - started - sum(phases.values())
    info = msgspec.structs.replace(engine.info, startup_seconds={"import": imports, **phases})
    return msgspec.structs.replace(engine, info=info)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
