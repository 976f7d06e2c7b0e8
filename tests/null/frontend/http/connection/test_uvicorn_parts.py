"""What the server relies on inside of uvicorn. Raise the pinned version only when all of this still holds.

uvicorn has no options for the bounds in protocol.py and for a server that handles signals itself, so parts
that it does not document are overridden, and its version is pinned exactly. tests/e2e/frontend/
test_connections.py tests the behaviour itself, through sockets.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import signal
import tomllib
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.server import ServerState

from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.connection.protocol import BoundedProtocol, bounded_protocol
from pegainfer.frontend.http.connection.server import make_server
from tests.support.asgi import make_app, run
from tests.support.fake_engine import FakeEngine

ROOT = Path(__file__).parents[5]
PARENT = httptools_impl.HttpToolsProtocol
# Methods that protocol.py overrides, with the arguments of uvicorn's own.
OVERRIDDEN = {
    "__init__": ["config", "server_state", "app_state", "_loop"],
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "on_message_begin": [],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_message_complete": [],
    "on_response_complete": [],
    "_start_asgi_task": ["cycle", "app"],
}
# What it uses of a connection, and of a request that is being answered.
CONNECTION = {
    "app", "client", "cycle", "flow", "headers", "loop", "parser", "pipeline", "transport", "url",
    "_unset_keepalive_if_required",
}  # fmt: skip
CYCLE = {
    "chunked_encoding", "disconnected", "expected_content_length", "keep_alive", "message_event", "more_body",
    "response_complete", "response_started", "send",
}  # fmt: skip


def arguments(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_installed_version_is_the_pinned_one() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (pin,) = [line for line in wanted if line.startswith("uvicorn")]
    assert pin == "uvicorn==" + importlib.metadata.version("uvicorn")


def test_no_other_methods_are_overridden() -> None:
    shared = {name for name in vars(BoundedProtocol) if name in vars(PARENT)}
    assert shared - {"__module__", "__doc__", "__static_attributes__", "__firstlineno__"} == set(OVERRIDDEN)
    assert {name: arguments(getattr(PARENT, name)) for name in OVERRIDDEN} == OVERRIDDEN


def test_a_connection_has_what_is_used() -> None:
    async def main() -> None:
        connection = bounded_protocol(HttpConfig(), lambda *_: None)(
            uvicorn.Config(make_app(FakeEngine())), ServerState(), {}
        )
        PARENT.on_message_begin(connection)  # makes `url`
        assert {name for name in CONNECTION if not hasattr(connection, name)} == set()

    run(main)
    # Requests sent ahead wait in the pipeline while reading is paused; protocol.py resumes it.
    used = set(PARENT.on_headers_complete.__code__.co_names)
    assert {"app", "cycle", "flow", "pause_reading", "pipeline", "_start_asgi_task"} <= used


def test_a_cycle_has_what_is_used() -> None:
    cycle = httptools_impl.RequestResponseCycle
    assert {*cycle.__init__.__code__.co_names, "send"} >= CYCLE
    # An answer of unknown length to HTTP/1.0 is ended by these.
    assert {"chunked_encoding", "expected_content_length"} <= set(cycle.send.__code__.co_names)


def test_a_server_has_what_is_used() -> None:
    """It must neither take signals nor hide when it accepts connections."""
    assert arguments(uvicorn.Server.startup) == ["sockets"]
    assert arguments(uvicorn.Server.serve) == ["sockets"]
    used = set(uvicorn.Server.serve.__code__.co_names)
    assert "capture_signals" in used
    assert {"startup", "shutdown", "should_exit"} <= set(uvicorn.Server._serve.__code__.co_names)
    server = make_server(make_app(FakeEngine()), HttpConfig())
    assert (server.should_exit, server.force_exit, server.up.is_set()) == (False, False, False)
    before = signal.getsignal(signal.SIGINT)
    with server.capture_signals():
        assert signal.getsignal(signal.SIGINT) is before
