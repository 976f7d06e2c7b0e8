"""One HTTP request's stay in the engine: submitted, followed to its last event, cancelled if nobody waits.

start ──► prompts wait ──► first event: the queue's place is given back ──► every choice finished ──► close
             │ the client hangs up, /v1/abort, shutdown: cancelled in the engine at once
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from pegainfer.contract.event import FinishReason, Timings, TokenEvent, TokenLogprob
from pegainfer.contract.handle import EngineHandle
from pegainfer.contract.request import GenerateRequest
from pegainfer.frontend.http.answer.choice import Choice, Delta
from pegainfer.frontend.http.answer.registry import Registry
from pegainfer.frontend.http.observation.metrics import FrontMetrics
from pegainfer.frontend.http.request.body import ClientGoneError
from pegainfer.frontend.http.request.limits import Gate

# Of a token's logprob, and of each alternative beside it, as the objects that an answer is made of (Python
# 3.11: a completion of 128,000 tokens with 20 alternatives takes 3.2 kB a token until it is sent).
LOGPROB_BYTES, ALTERNATIVE_BYTES = 400, 150


class Echo(msgspec.Struct):
    """A prompt's text, and where each of its tokens begins in it, in characters."""

    text: str
    starts: list[int]


class Prompt(msgspec.Struct):
    """One engine request and what is known of it so far."""

    request: GenerateRequest
    num_tokens: int
    choices: list[Choice]
    ids: list[int]
    echo: Echo | None = None  # where the client wants the prompt back
    waiting: bool = True  # no event yet: it holds a place in the queue
    sent: bool = False  # the engine has it
    cancelled: bool = False  # and was told to end it
    ended: int = 0  # indices whose last event came from the engine
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    embedding: bytes | None = None  # float32 LE, where the prompt is pooled

    @property
    def live(self) -> bool:
        """The engine still works on it."""
        return self.sent and self.ended < len(self.choices)


def most_logprobs_bytes(prompts: Sequence[Prompt], max_model_len: int) -> int:
    """What the logprobs of an answer may come to take, if nothing ends before its bound."""
    sampling = prompts[0].request.sampling
    sums = []
    if sampling.logprobs is not None:
        rooms = [(len(p.choices), max_model_len - p.num_tokens) for p in prompts]
        most = max_model_len if sampling.max_tokens is None else sampling.max_tokens
        sums.append((sampling.logprobs, sum(n * min(most, room) for n, room in rooms)))
    if sampling.prompt_logprobs is not None:
        sums.append((sampling.prompt_logprobs, sum(p.num_tokens for p in prompts)))
    return sum(tokens * (LOGPROB_BYTES + top * ALTERNATIVE_BYTES) for top, tokens in sums)


class Generation:
    """Made and used on the event loop; only its sink may be called from another thread."""

    def __init__(
        self,
        id: str,
        prompts: list[Prompt],
        *,
        engine: EngineHandle,
        gate: Gate,
        registry: Registry,
        metrics: FrontMetrics,
        arrival: float,
        model: str = "",
    ) -> None:
        """`model`: the served name of the model that answers, for records."""
        self.id = id
        self.model = model
        self.prompts = prompts
        self._engine = engine
        self._gate = gate
        self._registry = registry
        self._metrics = metrics
        self._arrival = arrival
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._events: list[tuple[Prompt, TokenEvent]] = []
        self._waiter: asyncio.Future[None] | None = None
        self.adapter = prompts[0].request.adapter  # the same for all of them
        self.num_choices = sum(len(p.choices) for p in prompts)
        self._open = self.num_choices  # choices without a finish
        self.gone = False  # the client hung up
        self.first_token = 0.0  # seconds from arrival until the first one, 0 before it
        self.queue = 0.0  # seconds from arrival until its first step, known at the end
        self.detokenize = 0.0  # seconds that its events took on the event loop
        self.timings: Timings | None = None  # the engine's, of the choice that ended last
        self.late = 0.0  # seconds from that end until it was known here
        self.gap = 0.0  # longest time between two deliveries of a choice
        self._closed = False
        self._poked = False
        self._written = arrival  # CLOCK_MONOTONIC seconds of the last delivery, for keep-alives

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Submits every prompt, or none. Raises what the gate, the registry or the engine raises."""
        self._registry.add(self)
        try:
            self._gate.take([p.num_tokens for p in self.prompts], self.prompts[0].request.tenant)
        except Exception:
            self._closed = True
            self._registry.remove(self)
            raise
        try:
            for prompt in self.prompts:
                self._engine.submit(prompt.request, self._sink(prompt))
                prompt.sent = True
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels what still runs and forgets the rest. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for prompt in self.prompts:
            self._cancel(prompt)
            self._admitted(prompt)
        self._metrics.abandon(self._open)
        self._registry.remove(self)

    def abort(self) -> None:
        """Ends every choice with finish_reason 'abort'; their last events still arrive."""
        for prompt in self.prompts:
            self._cancel(prompt)

    def client_gone(self) -> None:
        """Nobody reads the answer any more."""
        self.gone = True
        self.close()
        self._wake()

    def _cancel(self, prompt: Prompt) -> None:
        if prompt.live and not prompt.cancelled:
            prompt.cancelled = True
            self._engine.cancel(prompt.request.id)

    def _admitted(self, prompt: Prompt) -> None:
        if prompt.waiting:
            prompt.waiting = False
            self._gate.release(prompt.num_tokens, prompt.request.tenant)

    # ------------------------------------------------------------------ events

    def _sink(self, prompt: Prompt) -> Callable[[TokenEvent], None]:
        def sink(event: TokenEvent) -> None:
            if threading.get_ident() == self._thread:
                self._arrived(prompt, event)
            else:
                self._loop.call_soon_threadsafe(self._arrived, prompt, event)

        return sink

    def _arrived(self, prompt: Prompt, event: TokenEvent) -> None:
        if event.finish is not None:
            prompt.ended += 1
        if self._closed:
            return
        self._admitted(prompt)
        self._events.append((prompt, event))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def poke(self, now: float, silence: float) -> None:
        """Makes `next` return nothing if nothing was delivered for `silence` seconds."""
        if now - self._written >= silence:
            self._written = now
            self._poked = True
            self._wake()

    @property
    def done(self) -> bool:
        return self._open == 0

    async def next(self) -> list[Delta]:
        """What came since the last call, in order; waits for something. Empty after a long silence.

        Raises ClientGoneError once the client has hung up.
        """
        deltas: list[Delta] = []
        while not deltas and not self._poked:
            if not self._events and not self.gone:
                self._waiter = self._loop.create_future()
                await self._waiter
            if self.gone:
                raise ClientGoneError
            events, self._events = self._events, []
            now = self._written = time.monotonic()
            for prompt, event in events:
                delta = self._take(prompt, event, now)
                if delta is not None:
                    deltas.append(delta)
            spent = time.monotonic() - now
            self.detokenize += spent
            self._metrics.host_seconds["detokenize"] += spent
        self._poked = False
        return deltas

    def _take(self, prompt: Prompt, event: TokenEvent, now: float) -> Delta | None:
        if event.num_cached_tokens:
            prompt.cached_tokens = event.num_cached_tokens
        if event.prompt_logprobs is not None:
            prompt.prompt_logprobs = event.prompt_logprobs
        if event.embedding is not None:
            prompt.embedding = event.embedding
        choice = prompt.choices[event.index]
        if choice.finish is not None:
            return None  # generated beyond a stop string
        if event.tokens:
            if choice.last_time:
                gap = now - choice.last_time
                if gap > self.gap:
                    self.gap = gap
                self._metrics.inter_token.observe(gap)
            elif event.index == 0:
                self._metrics.first_token.observe(now - self._arrival)
                self.first_token = self.first_token or now - self._arrival
            choice.last_time = now
        delta = choice.feed(event)
        if delta.finish is not None:
            self._finished(prompt, choice, event, now)
        return delta

    def _finished(self, prompt: Prompt, choice: Choice, event: TokenEvent, now: float) -> None:
        self._open -= 1
        if all(c.finish is not None for c in prompt.choices):
            self._cancel(prompt)  # a stop string may have ended it here, not there
        elif event.finish is None and not prompt.cancelled:
            self._engine.cancel(prompt.request.id, event.index)  # the others go on
        timings = event.timings
        if event.finish is None:
            timings = Timings(arrival=self._arrival, finished=now)
        elif timings is not None and timings.scheduled:
            self.queue = self.queue or max(0.0, timings.scheduled - timings.arrival)
            self.timings, self.late = timings, max(0.0, now - timings.finished)
        reason = choice.finish or FinishReason.STOP.value
        self._metrics.finish(reason, prompt.num_tokens, choice.num_tokens, timings, now)

    # ------------------------------------------------------------------ sums

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.prompts[0].request.tenant

    @property
    def prompt_tokens(self) -> int:
        return sum(p.num_tokens for p in self.prompts)

    @property
    def cached_tokens(self) -> int:
        return sum(p.cached_tokens for p in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(c.num_tokens for p in self.prompts for c in p.choices)

    @property
    def bulk(self) -> int:
        """About how many values its answer holds."""
        sampling = self.prompts[0].request.sampling
        values = self.completion_tokens * (1 + (sampling.logprobs or 0))
        if sampling.prompt_logprobs is not None:
            values += self.prompt_tokens * (1 + sampling.prompt_logprobs)
        return values + sum(len(p.embedding or b"") // 4 for p in self.prompts)
