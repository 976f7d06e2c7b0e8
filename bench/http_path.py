"""Requests a second through the whole HTTP path on the null device, beside a bare handler of the same stack.

    python bench/http_path.py [--rounds 5] [--requests 2000]

Client, front and engine share the machine. The bare handler is Starlette on uvicorn: it reads the body and
answers constant bytes. Cases alternate, medians are printed; the front's cost of a streamed token is its CPU
time over the tokens that it streamed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLI = [sys.executable, "-m", "pegainfer.cli.main"]
PROMPT, OUTPUT, CLIENTS = 32, 8, 64
LISTENING = "listening on http://127.0.0.1:"
CHUNK = {
    "id": "cmpl-0123456789abcdef",
    "object": "text_completion",
    "created": 1700000000,
    "model": "null",
    "choices": [{"index": 0, "text": "x", "finish_reason": None}],
}
USAGE = {"prompt_tokens": PROMPT, "completion_tokens": OUTPUT, "total_tokens": PROMPT + OUTPUT}


def bare() -> None:
    """Serves constants on a free port until it is ended."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    choice = CHUNK["choices"][0]  # type: ignore[index]
    last = CHUNK | {"choices": [choice | {"finish_reason": "length"}]}
    events = [b"data: " + json.dumps(CHUNK).encode() + b"\n\n"] * (OUTPUT - 1)
    events.append(b"data: " + json.dumps(last).encode() + b"\n\n")
    events.append(b"data: " + json.dumps(CHUNK | {"choices": [], "usage": USAGE}).encode() + b"\n\n")
    events.append(b"data: [DONE]\n\n")
    body = json.dumps(last | {"usage": USAGE}).encode()

    async def stream() -> Any:
        for event in events:
            yield event

    async def completions(request: Request) -> Response:
        if b'"stream":true' in await request.body():
            return StreamingResponse(stream(), media_type="text/event-stream")
        return Response(body, media_type="application/json")

    async def models(request: Request) -> Response:
        return Response(b'{"data":[{"id":"null"}]}', media_type="application/json")

    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models)]
    config = uvicorn.Config(
        Starlette(routes=routes), port=0, log_level="error", access_log=False, loop="uvloop"
    )
    server = uvicorn.Server(config)
    started = server.startup

    async def startup(sockets: Any = None) -> None:
        await started(sockets=sockets)
        port = server.servers[0].sockets[0].getsockname()[1]
        print(f"{LISTENING}{port}", flush=True)

    server.startup = startup  # type: ignore[method-assign]
    server.run()


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[tuple[int, int]]:
    """A server's port and process id."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(LISTENING):
                yield int(line.rstrip().rsplit(":", 1)[1]), process.pid
                return
        raise SystemExit(f"{command} ended before it listened")
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of one process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    rate: float  # requests a second
    front_us: float  # CPU of the server's front process a token, in µs
    client_us: float  # CPU of the client an event, in µs
    health_p99: float  # ms


def measure(port: int, pid: int, requests: int, *, stream: bool) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--port", str(port), "--num-prompts", str(requests), "--max-concurrency", str(CLIENTS)]
        flags += ["--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--ignore-eos"]
        flags += ["--save-result", "--result-dir", folder, "--result-filename", "r.json", "--probe-health"]
        flags += [] if stream else ["--no-stream-response"]
        before = cpu_seconds(pid)
        subprocess.run([*CLI, "bench", "serve", *flags], check=True, stdout=subprocess.DEVNULL)
        used = cpu_seconds(pid) - before
        result = json.loads((Path(folder) / "r.json").read_text())
    assert result["failed"] == 0 and result["total_output_tokens"] == requests * OUTPUT, result["failures"]
    return Measured(
        rate=result["request_throughput"],
        front_us=used / (requests * OUTPUT) * 1e6,
        client_us=result["client_cpu_us_per_event"],
        health_p99=result["p99_health_ms"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--bare", action="store_true", help="serve the bare handler")
    options = parser.parse_args()
    if options.bare:
        bare()
        return
    ours: dict[bool, list[Measured]] = {True: [], False: []}
    constants: dict[bool, list[Measured]] = {True: [], False: []}
    null = [*CLI, "serve", "--device", "null", "--port", "0"]
    with serving(null) as server, serving([sys.executable, __file__, "--bare"]) as handler:
        for i in range(options.rounds + 1):
            for stream in (False, True):
                count = options.requests if i else CLIENTS  # one short round, to warm up
                pairs = ((server, ours), (handler, constants))
                for (port, pid), runs in pairs:
                    measured = measure(port, pid, count, stream=stream)
                    if i:
                        runs[stream].append(measured)
    load = os.getloadavg()[0]
    print(f"{PROMPT} in, {OUTPUT} out, {CLIENTS} clients, {os.cpu_count()} cores, load {load:.1f}; medians")
    for stream in (False, True):
        rate = statistics.median(m.rate for m in ours[stream])
        most = max(m.rate for m in ours[stream])
        bare_rate = statistics.median(m.rate for m in constants[stream])
        print(f"{'streamed' if stream else 'whole':9} {rate:7.0f} requests/s (best {most:.0f}), "
              f"bare handler {bare_rate:.0f}, ratio {rate / bare_rate:.2f}")  # fmt: skip
    front = statistics.median(m.front_us for m in ours[True])
    client = statistics.median(m.client_us for m in ours[True])
    health = statistics.median(m.health_p99 for m in ours[True])
    print(f"front CPU a streamed token {front:.0f} µs, client {client:.0f} µs, /health p99 {health:.1f} ms")


if __name__ == "__main__":
    main()
