"""The engine's process: `python -m pegainfer.cli.engine_process SOCKET SPEC`, started by `serve`.

SPEC is an EngineSpec as JSON. How it ends: 0 when the front has hung up or asked for it, 1 where the engine
failed, 2 where the user can cure it; why is told through the socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from pegainfer.cli.spec import LOG_FORMAT, EngineSpec, build, make_grammars
from pegainfer.contract.errors import PegaError

if TYPE_CHECKING:
    from pegainfer.contract.handle import EngineInfo
    from pegainfer.contract.step import Runner


def main(socket_path: str, spec_json: str) -> int:
    # Ctrl-C reaches every process of the terminal; what it means is decided by the front.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    faulthandler.enable()  # a crash in a kernel leaves the stack of every thread on standard error
    spec = msgspec.json.decode(spec_json, type=EngineSpec)
    if spec.engine.backend == "cuda":
        threading.Thread(target=_warm_up, args=(spec.engine.device_ordinal,), daemon=True).start()
    from pegainfer.engine.process import serve_engine

    return serve_engine(
        lambda: _build(spec), socket_path, spec.scheduler, grammars=lambda info: make_grammars(spec, info)
    )


def _warm_up(ordinal: int) -> None:
    """Beside the imports, what the driver and cuBLASLt do once in a process; it waits, so it costs nothing.

    What is wrong shows when the GPU is opened for use.
    """
    with contextlib.suppress(PegaError):
        from pegainfer.runtime.cuda.device import Device

        Device.open(ordinal)  # stays open: the next one finds the context there
        from pegainfer.runtime.cuda.cublaslt import warm_up

        warm_up()


def _build(spec: EngineSpec) -> tuple[Runner, EngineInfo]:
    """The engine's parts, with the time its imports took among the phases."""
    started = time.perf_counter()
    engine = build(spec)
    phases = dict(engine.info.startup_seconds)
    imports = time.perf_counter() - started - sum(phases.values())
    info = msgspec.structs.replace(engine.info, startup_seconds={"import": imports, **phases})
    return engine.runner, info


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
