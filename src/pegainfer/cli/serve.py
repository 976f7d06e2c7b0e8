"""pegainfer serve: the HTTP front in this process, the engine in one beside it."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import msgspec
import typer

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.fleet_flags import FleetFlags, choose_all, of_several
from pegainfer.cli.spec import LOG_FORMAT
from pegainfer.cli.target import MODEL_HELP, ModelFlags, choose
from pegainfer.engine.config import SchedulerConfig
from pegainfer.frontend.http.config import HttpConfig


def serve(
    model: Annotated[
        list[str] | None, typer.Argument(help=MODEL_HELP + " Several: each is loaded when it is asked for.")
    ] = None,
    *,
    flags: ModelFlags,
    http: HttpConfig,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    fleet: FleetFlags,
    given: Given,
) -> int:
    """Serve a model, or several, over HTTP with OpenAI's routes.

    SIGTERM or Ctrl-C lets running requests finish; a second one aborts them.
    """
    from pegainfer.frontend.http.connection.server import bind_socket
    from pegainfer.frontend.http.connection.tls import check_certificate

    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    http = http.with_environment(os.environ)
    check_certificate(http)
    listener = bind_socket(http.host, http.port)  # before anything slow: a taken port is an error at once
    try:
        if len(model or ()) > 1 or fleet.models_dir is not None:
            targets = choose_all(model or (), flags, engine, scheduler, fleet, given)
            from pegainfer.cli.fleet import run_fleet

            return run_fleet(targets, of_several(http), fleet, listener)
        given.refuse(FleetFlags, "a server with one model")
        target = choose(model[0] if model else None, flags, engine, scheduler, given)
        if http.trace:
            spec = msgspec.structs.replace(target.spec, time_ops=True)
            target = msgspec.structs.replace(target, spec=spec)
        from pegainfer.cli.serving import run_server_processes

        return run_server_processes(target, http, listener)
    finally:
        listener.close()
