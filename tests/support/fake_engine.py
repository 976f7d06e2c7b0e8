"""An EngineHandle without an engine: it answers from a script, on the event loop, one event at a time."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import EngineDeadError
from pegainfer.contract.event import EngineStats, FinishReason, Timings, TokenEvent, TokenLogprob
from pegainfer.contract.handle import DoneSink, EngineInfo, EventSink
from pegainfer.contract.request import GenerateRequest, unpack_tokens
from pegainfer.contract.trace import StepSink
from pegainfer.frontend.byte_tokenizer import VOCAB_SIZE

INFO = EngineInfo(
    model="fake",
    architecture="FakeForCausalLM",
    device="none",
    vocab_size=VOCAB_SIZE,
    max_model_len=256,
    block_size=16,
    num_blocks=64,
    max_slots=8,
    startup_seconds={"warm": 0.25},
)

# What a request's index is answered with: token ids, one event each; tuples are several tokens in one event.
Script = Callable[[GenerateRequest, int], Sequence[int | tuple[int, ...]]]


def says(text: str | bytes) -> Script:
    """Answers every request with this text, byte by byte, as often as max_tokens allow."""
    ids = list(text.encode() if isinstance(text, str) else text)
    return lambda request, index: ids


def logprob_of(token: int, k: int) -> TokenLogprob:
    """A made-up logprob that a test can recompute."""
    top = tuple(((token + i) % VOCAB_SIZE, -0.25 * (i + 1)) for i in range(k))
    return TokenLogprob(token, -0.25, 1, top)


def embedding_of(request: GenerateRequest) -> bytes:
    """A made-up vector: the prompt's first and last token and its length."""
    ids = unpack_tokens(request.prompt)
    return struct.pack("<3f", ids[0], ids[-1], len(ids))


@dataclass
class _Live:
    request: GenerateRequest
    sink: EventSink
    scripts: dict[int, list[int | tuple[int, ...]]]
    done: dict[int, int] = field(default_factory=dict)  # tokens by index
    arrival: float = 0.0


class FakeEngine:
    """Holds a request's events back while `paused`; `step` lets one event of every index out."""

    def __init__(
        self, script: Script | None = None, *, info: EngineInfo = INFO, paused: bool = False
    ) -> None:
        self._info = info
        self._script = script or says("hello")
        self._live: dict[str, _Live] = {}
        self._scheduled = False
        self._stats = EngineStats(total_blocks=info.num_blocks, free_blocks=info.num_blocks)
        self.paused = paused
        self.is_alive = True
        self.refuse: Exception | None = None  # raised by the next submits
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.cancelled_indices: list[tuple[str, int]] = []
        self._adapters: dict[str, AdapterInfo] = {}
        self.traced: StepSink | None = None  # gets what the test hands over as steps
        self.resets = 0
        self.drained = False
        self.closed = False

    # EngineHandle

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: GenerateRequest, sink: EventSink) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        scripts = {i: list(self._script(request, i)) for i in range(request.n)}
        self._live[request.id] = _Live(request, sink, scripts, arrival=time.monotonic())
        self._schedule()

    def cancel(self, request_id: str, index: int | None = None) -> None:
        if index is not None:
            self.cancelled_indices.append((request_id, index))
            if request_id in self._live and index in self._live[request_id].scripts:
                event = TokenEvent(request_id=request_id, index=index, finish=FinishReason.ABORT)
                self._end(self._live[request_id], event)
            return
        self.cancelled.append(request_id)
        live = self._live.pop(request_id, None)
        if live is not None:
            for index in live.scripts:
                live.sink(TokenEvent(request_id=request_id, index=index, finish=FinishReason.ABORT))

    def load_adapter(self, name: str, path: str, done: DoneSink, inplace: bool = False) -> None:
        self._adapters[name] = AdapterInfo(name=name, path=path, digest=b"")
        done(None)

    def unload_adapter(self, name: str, done: DoneSink) -> None:
        del self._adapters[name]
        done(None)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._adapters.values())

    def trace(self, sink: StepSink | None) -> None:
        before, self.traced = self.traced, sink
        if sink is None and before is not None:
            before([])

    def reset_prefix_cache(self, done: DoneSink) -> None:
        self.resets += 1
        done(None)

    def stats(self) -> EngineStats:
        return self._stats

    def alive(self) -> bool:
        return self.is_alive

    def death(self) -> EngineDeadError | None:
        return None if self.is_alive else EngineDeadError("the engine process has ended")

    def drain(self) -> None:
        self.drained = True

    def close(self) -> None:
        self.closed = True

    # for tests

    @property
    def num_live(self) -> int:
        return len(self._live)

    def set_stats(self, stats: EngineStats) -> None:
        self._stats = stats

    def resume(self) -> None:
        self.paused = False
        self._schedule()

    def step(self) -> None:
        """One event for every index of every live request."""
        for live in list(self._live.values()):
            for index in list(live.scripts):
                self._advance(live, index)

    def fail(self, request_id: str, event: TokenEvent) -> None:
        """Ends one index with the given event."""
        live = self._live[request_id]
        self._end(live, event)

    def die(self) -> None:
        self.is_alive = False
        for live in list(self._live.values()):
            for index in list(live.scripts):
                event = TokenEvent(
                    request_id=live.request.id,
                    index=index,
                    finish=FinishReason.ERROR,
                    error="the engine process has ended",
                    error_kind="EngineDeadError",
                )
                self._end(live, event)

    def _schedule(self) -> None:
        if not self._scheduled and not self.paused:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._scheduled = False
        if not self.paused:
            self.step()
            if self._live:
                self._schedule()

    def _advance(self, live: _Live, index: int) -> None:
        request, sampling = live.request, live.request.sampling
        script = live.scripts[index]
        first = index not in live.done
        done = live.done.setdefault(index, 0)
        room = self._info.max_model_len - len(request.prompt) // 4
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        piece = script.pop(0) if script else 0x2E  # '.', for ever
        tokens = (piece if isinstance(piece, tuple) else (piece,))[: limit - done]
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
        finish = stop = None
        if tokens and tokens[-1] in stops and done + len(tokens) > sampling.min_tokens:
            finish, stop = FinishReason.STOP, tokens[-1]
        elif done + len(tokens) >= limit:
            finish = FinishReason.LENGTH
        live.done[index] = done + len(tokens)
        k = sampling.logprobs
        now = time.monotonic()
        event = TokenEvent(
            request_id=request.id,
            index=index,
            tokens=tokens,
            logprobs=None if k is None else tuple(logprob_of(t, k) for t in tokens),
            prompt_logprobs=self._prompt_logprobs(request) if first and index == 0 else None,
            num_cached_tokens=16 if first and len(request.prompt) // 4 > 16 else 0,
            embedding=embedding_of(request) if finish and sampling.pooling else None,
            finish=finish,
            stop_token=stop,
            timings=Timings(live.arrival, live.arrival, live.arrival, live.arrival, now) if finish else None,
        )
        if finish is None:
            live.sink(event)
        else:
            self._end(live, event)

    def _prompt_logprobs(self, request: GenerateRequest) -> tuple[TokenLogprob | None, ...] | None:
        k = request.sampling.prompt_logprobs
        if k is None:
            return None
        return (None, *(logprob_of(t, k) for t in unpack_tokens(request.prompt)[1:]))

    def _end(self, live: _Live, event: TokenEvent) -> None:
        del live.scripts[event.index]
        if not live.scripts:
            self._live.pop(live.request.id, None)
        live.sink(event)
