"""One answer, streamed from an engine in this process: what `generate` and `chat` share."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pegainfer.cli.target import Target
    from pegainfer.contract.event import TokenEvent
    from pegainfer.contract.handle import EngineInfo
    from pegainfer.contract.request import GenerateRequest
    from pegainfer.engine.inprocess import InProcessEngine
    from pegainfer.frontend.tokenizer import Tokenizer


class Draw(Protocol):
    """The flags that say how an answer is drawn."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...


@contextlib.contextmanager
def running(target: Target) -> Iterator[tuple[InProcessEngine, EngineInfo]]:
    """The target's engine in this process, until the context ends. Raises what `build` raises."""
    from pegainfer.cli.spec import build
    from pegainfer.engine.inprocess import InProcessEngine

    built = build(target.spec)
    engine = InProcessEngine(
        built.runner, built.info, target.spec.scheduler, policy=built.policy(target.spec.scheduler),
        peers=built.peers,
    )  # fmt: skip
    try:
        yield engine, built.info
    finally:
        engine.close()


def request_for(
    id: str,
    ids: list[int],
    tokenizer: Tokenizer,
    draw: Draw,
    seed: int | None,
    max_tokens: int,
    *,
    ignore_eos: bool = False,
) -> GenerateRequest:
    """What the engine is asked.

    Args:
        ids: of the prompt.
    """
    from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens

    sampling = SamplingParams(
        temperature=draw.temperature,
        top_k=0 if draw.top_k == -1 else draw.top_k,
        top_p=draw.top_p,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    return GenerateRequest(
        id=id, prompt=pack_tokens(ids), sampling=sampling, eos_token_ids=tokenizer.eos_token_ids
    )


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Args:
        text: as it was shown.
        count: tokens generated.
        interrupted: the user stopped it.
    """

    text: str
    count: int
    event: TokenEvent
    interrupted: bool

    def speed(self, prompt: int) -> str:
        """One line for standard error, after a prompt of that many tokens.

        Decoding is counted from the first token, which ends the prefill.
        """
        t = self.event.timings
        if t is None or self.count == 0:
            return f"[{prompt} prompt tokens, no answer]"
        first = t.first_token - t.scheduled
        line = f"[{prompt} prompt tokens in {first:.2f} s"
        if self.count > 1 and t.finished > t.first_token:
            rate = (self.count - 1) / (t.finished - t.first_token)
            line += f", {self.count} tokens at {rate:.1f} tokens/s"
        return line + "]"


def stream(
    engine: InProcessEngine,
    request: GenerateRequest,
    tokenizer: Tokenizer,
    stop: tuple[str, ...],
    put: Callable[[str], None],
    *,
    interruptible: bool = False,
) -> Answer:
    """Submits the request and shows its text as it comes.

    Args:
        put: takes each piece of text.
        stop: strings that end the answer and are not shown.
        interruptible: Ctrl-C cancels the request and returns what came until then.

    Raises what an ERROR event stands for: RequestError for a request that the engine refuses, EngineDeadError
    where the engine has failed, PegaError where this request has.
    """
    from pegainfer.contract.event import error_of
    from pegainfer.frontend.detokenize import Detokenizer, StopStrings
    from pegainfer.frontend.http.answer.choice import Choice

    choice = Choice(0, Detokenizer(tokenizer), StopStrings(stop))
    events: queue.SimpleQueue[TokenEvent | None] = queue.SimpleQueue()  # None: Ctrl-C
    texts: list[str] = []
    count, interrupted = 0, False
    with _interrupts_to(events) if interruptible else contextlib.nullcontext():
        engine.submit(request, events.put)
        while True:
            event = events.get()
            if event is None:
                if interrupted:
                    raise KeyboardInterrupt
                interrupted = True
                engine.cancel(request.id)
                continue
            if event.error is not None:
                raise error_of(event)
            count += len(event.tokens)
            if choice.finish is None and not interrupted:
                text = choice.feed(event).text
                if text:
                    texts.append(text)
                    put(text)
            if event.finish is not None:
                break
            if choice.finish is not None:
                engine.cancel(request.id)
    return Answer("".join(texts), count, event, interrupted)


@contextlib.contextmanager
def _interrupts_to(events: queue.SimpleQueue[TokenEvent | None]) -> Iterator[None]:
    """Ctrl-C becomes an entry of the queue: as an exception it could strike between any two lines."""
    before = signal.signal(signal.SIGINT, lambda number, frame: events.put(None))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def show(text: str) -> None:
    """Text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
