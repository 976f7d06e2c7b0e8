"""The last steps and requests of a server, and the file that they are written to.

A file is JSON of Chrome's trace event format, which Perfetto reads, too. Beside the events it holds the
records themselves under `pegainfer`, for `pegainfer trace`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pegainfer import __version__
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.observation import RequestRecord
from pegainfer.contract.trace import STAGES, StepTrace
from pegainfer.observe.explain import Explainer

MAX_STEPS = 32768  # some 12 MB
MAX_REQUESTS = 4096
MAX_SLOW = 20  # requests that `slow_requests` lists
ENGINE, FRONT = 1, 2  # process ids in the events
DEVICE_LANE, HOST_LANE, OPS_LANE = 1, 2, 3


class Trace(msgspec.Struct):
    """What a file holds. Times of records are CLOCK_MONOTONIC seconds of the server's machine.

    Args:
        model, device: as EngineInfo has them.
    """

    version: str = __version__
    model: str = ""
    device: str = ""
    steps: list[StepTrace] = []
    requests: list[RequestRecord] = []


class _File(msgspec.Struct, kw_only=True):
    events: list[dict[str, Any]] = msgspec.field(name="traceEvents", default_factory=list)
    unit: str = msgspec.field(name="displayTimeUnit", default="ms")
    trace: Trace = msgspec.field(name="pegainfer")


class RingBuffer:
    """Implements contract.observation.TraceBuffer. Belongs to one thread but for `encoded`, which copies."""

    def __init__(self, model: str = "", device: str = "") -> None:
        self._model = model
        self._device = device
        self._steps: deque[StepTrace] = deque(maxlen=MAX_STEPS)
        self._requests: deque[RequestRecord] = deque(maxlen=MAX_REQUESTS)

    def __call__(self, record: RequestRecord) -> None:
        if record.timings is not None:
            self._requests.append(record)

    def steps(self, steps: list[StepTrace]) -> None:
        self._steps.extend(steps)

    def trace(self, since: float = 0.0) -> Trace:
        """What ended at `since` or later."""
        return Trace(
            model=self._model,
            device=self._device,
            steps=[s for s in self._steps.copy() if s.ended >= since],
            requests=[r for r in self._requests.copy() if r.clock + r.seconds >= since],
        )

    def encoded(self, since: float = 0.0) -> bytes:
        trace = self.trace(since)
        events = [*_names(), *_step_events(trace.steps), *_request_events(trace.requests)]
        return msgspec.json.encode(_File(events=events, trace=trace))

    def write(self, folder: Path) -> Path:
        """Writes a new file into the folder and returns its path. Raises OSError."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = folder / f"trace-{stamp}-{os.getpid()}.json"
        part = path.with_suffix(".part")
        part.write_bytes(self.encoded())
        part.rename(path)
        return path

    def slow_requests(self) -> list[dict[str, Any]]:
        trace = self.trace()
        found: list[dict[str, Any]] = []
        explainer = Explainer(trace.steps)
        for record in reversed(trace.requests):
            if findings := explainer.request(record):
                worst = findings[0]
                found.append(
                    {"id": record.id, "began": record.began, "seconds": record.seconds, "cause": worst.cause,
                     "lost": worst.seconds, "sentence": worst.sentence}
                )  # fmt: skip
            if len(found) == MAX_SLOW:
                break
        return found


def open_folder(path: str) -> Path:
    """The folder for traces, made where it is missing. Raises ConfigError where nothing can be written."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError("cannot make the folder for traces", got=e.strerror, where=f"--trace {path}") from e
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("cannot write to the folder for traces", where=f"--trace {path}")
    return folder


def read_trace(path: Path) -> Trace:
    """The records of a file. Raises ConfigError for a file that is none of ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).trace
    except OSError as e:
        raise ConfigError("cannot read the trace", got=e.strerror, where=path) from e
    except msgspec.DecodeError as e:
        raise ConfigError(
            "no trace", expected="a file of `serve --trace` or POST /debug/trace", got=e, where=path
        ) from e


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _names() -> Iterator[dict[str, Any]]:
    for pid, name in ((ENGINE, "engine"), (FRONT, "requests")):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    for tid, name in ((DEVICE_LANE, "device"), (HOST_LANE, "host"), (OPS_LANE, "ops of sampled steps")):
        yield {"ph": "M", "pid": ENGINE, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _step_events(steps: Sequence[StepTrace]) -> Iterator[dict[str, Any]]:
    """A step on the device's lane, and what the host did meanwhile on its own, in order."""
    for s in steps:
        if s.ops:
            yield from _op_events(s)
        kind = "decode" if not s.prefill_tokens else "mixed" if s.decode_rows else "prefill"
        figures = {n: getattr(s, n) for n in s.__struct_fields__ if n not in ("ended", "stages", "ops")}
        yield {
            "ph": "X", "pid": ENGINE, "tid": DEVICE_LANE, "name": f"step {s.step} {kind}",
            "ts": _us(s.ended - s.device), "dur": _us(s.device), "args": figures,
        }  # fmt: skip
        at = s.ended - s.period
        for name, seconds in zip(STAGES, s.stages, strict=True):
            if seconds > 0.0:
                yield {
                    "ph": "X", "pid": ENGINE, "tid": HOST_LANE, "name": name, "ts": _us(at),
                    "dur": _us(seconds),
                }  # fmt: skip
                at += seconds


def _op_events(s: StepTrace) -> Iterator[dict[str, Any]]:
    """The ops of a sampled step, each once with its summed time, one after the other."""
    at = s.ended - s.device
    for name, seconds in s.ops.items():
        yield {
            "ph": "X", "pid": ENGINE, "tid": OPS_LANE, "name": name, "ts": _us(at), "dur": _us(seconds),
        }  # fmt: skip
        at += seconds


def _request_events(requests: Sequence[RequestRecord]) -> Iterator[dict[str, Any]]:
    """Each request as an asynchronous event, with its phases nested in it."""
    for r in requests:
        end = r.clock + r.seconds
        yield from _span(r.id, r.path, r.clock, end, msgspec.to_builtins(r))
        t = r.timings
        if t is None:
            continue
        for name, begin, until in (
            ("read, template, grammar, tokenise", r.clock, t.admitted),
            ("grammar in the engine", t.admitted, t.ready),
            ("queue", t.ready, t.scheduled),
            ("prefill", t.scheduled, t.first_token),
            ("decode", t.first_token, t.finished),
            ("last bytes", t.finished, end),
        ):
            if 0.0 < begin < until:
                yield from _span(r.id, name, begin, until, {})


def _span(id: str, name: str, begin: float, end: float, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    common = {"pid": FRONT, "tid": 1, "cat": "request", "id": id, "name": name}
    yield {"ph": "b", "ts": _us(begin), "args": args, **common}
    yield {"ph": "e", "ts": _us(end), **common}
