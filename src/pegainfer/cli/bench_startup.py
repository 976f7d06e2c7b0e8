"""pegainfer bench startup: from the start of the process to ready, and the memory of the idle server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given, flag_fields, flag_of, off_form
from pegainfer.cli.target import MODEL_HELP, ModelFlags, choose
from pegainfer.contract.errors import ConfigError, EngineDeadError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.frontend.processes import memory_of, process_family

QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 32
LISTENING = "listening on "
ANSWER_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class StartupBenchFlags:
    rounds: int = field(default=5, metadata={"help": "Servers to start, one after the other."})
    output: str = field(
        default="bench/results/startup.jsonl", metadata={"help": "File to append JSON lines to."}
    )

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError("rounds of a bench", expected="≥ 1", got=self.rounds, where="--rounds")


def startup(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    bench: StartupBenchFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    given: Given,
) -> int:
    """Start the server some times: seconds until ready, and the PSS of its processes after one answer."""
    import statistics

    from pegainfer.cli.machine import append_result, num_cores, provenance

    target = choose(model, flags, engine, SchedulerConfig(), given)
    where = provenance(num_cores())
    argv = (
        ["--device", flags.device]
        if target.model is None
        else [str(target.model.path), "--device", flags.device]
    )
    argv += _typed(engine, given)
    runs = [_one_start(argv) for _ in range(bench.rounds)]
    seconds = [run["ready_s"] for run in runs]
    memory = [run["pss_mb"] for run in runs]
    for line in runs[-1]["said"]:
        print(line)
    print(f"ready after {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
    print(f"PSS of all processes after one answer: {statistics.median(memory):.0f} MB")
    row = {**where, "bench": "startup", "model": target.spec.name, "device": flags.device}
    row |= {"ready_s": round(statistics.median(seconds), 3), "ready_runs": seconds}
    row |= {"pss_mb": round(statistics.median(memory), 1), "pss_runs": memory}
    append_result(Path(bench.output), row)
    return 0


def _typed(engine: EngineConfig, given: Given) -> list[str]:
    """The engine's flags that the user typed, for the server's command line."""
    argv: list[str] = []
    for each in flag_fields(EngineConfig):
        flag, value = flag_of(each), getattr(engine, each.name)
        if flag in given:
            argv += [flag if value else off_form(flag)] if isinstance(value, bool) else [flag, str(value)]
    return argv


def _one_start(argv: list[str]) -> dict[str, Any]:
    """Starts a server on a free port, asks one question, weighs it, and ends it."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "pegainfer.cli.main", "serve", *argv, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said, port = _until_listening(process)
        _get_ready(port)
        ready = time.perf_counter() - started
        _ask(port)
        return {
            "ready_s": round(ready, 3),
            "pss_mb": round(memory_of(process_family(process.pid)) / 1e6, 1),
            "said": said,
        }
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _until_listening(process: subprocess.Popen[str]) -> tuple[list[str], int]:
    """What the server says before it listens, and its port. Raises EngineDeadError where it ends instead."""
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        if line.startswith(LISTENING):
            return said, int(line.rstrip().rsplit(":", 1)[1])
        said.append(line.rstrip())
    raise EngineDeadError("the server ended before it listened", got=f"exit code {process.wait()}")


def _get_ready(port: int) -> None:
    status, _ = _request(port, "GET", "/ready")
    if status != 200:
        raise EngineDeadError("the server listens but is not ready", got=f"status {status}")


def _ask(port: int) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    status, answer = _request(port, "POST", "/v1/chat/completions", json.dumps(body))
    if status != 200:
        raise EngineDeadError("the server did not answer", got=f"{status} {answer[:200]!r}")


def _request(port: int, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own."""
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
