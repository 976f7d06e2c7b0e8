"""How the text side reaches an engine, in the same process or behind a socket."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import msgspec

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import EngineDeadError, PegaError
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.trace import StepSink

# Called for every event of a request, in order, from the handle's own thread or event loop: must not block.
EventSink = Callable[[TokenEvent], None]
# Called once when a call has ended, on the same thread as events: with None, or with why it failed.
DoneSink = Callable[[PegaError | None], None]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front must know of an engine before it takes requests."""

    model: str  # the model's own name, e.g. 'SmolLM2-135M-Instruct'
    architecture: str  # e.g. 'LlamaForCausalLM'
    device: str  # e.g. 'cpu (avx2, 2 threads)'
    vocab_size: int
    max_model_len: int
    block_size: int  # tokens a KV block, for block_hashes
    num_blocks: int
    max_slots: int
    max_logprobs: int = 20
    max_adapters: int = 0  # adapters that a step may mix; 0: the engine serves none
    startup_seconds: dict[str, float] = {}  # by phase: import, read, pack, warm


class EngineHandle(Protocol):
    """Submits and cancels are cheap and never block; results come through the sink."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: GenerateRequest, sink: EventSink) -> None:
        """Hands a request over. A refusal comes as an ERROR event or as an exception of contract.errors."""

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Idempotent; each cancelled index still gets its one finish (ABORT unless it ended before).

        Args:
            index: ends this continuation alone, and the others go on; None: all of them.
        """

    def stats(self) -> EngineStats:
        """The latest snapshot that the engine sent."""

    def load_adapter(self, name: str, path: str, done: DoneSink, inplace: bool = False) -> None:
        """Loads an adapter's files, which the engine must be able to read, under a new name.

        `adapters` has it before `done` is called, and requests may name it from then on. The files must stay
        as they are: an adapter that was not used for long is read again when a request names it.

        Args:
            inplace: the name may be that of a loaded adapter, which only its requests use from then on.
        """

    def unload_adapter(self, name: str, done: DoneSink) -> None:
        """Takes no more requests for an adapter. Those that were taken go on; then its memory is freed.

        When `done` is called, its files are no longer needed.
        """

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, as of the engine's last message."""

    def reset_prefix_cache(self, done: DoneSink) -> None:
        """Forgets all cached prefixes in every tier. Running requests go on, but cache nothing more."""

    def trace(self, sink: StepSink | None) -> None:
        """Records every step from now on and hands the records to `sink`, some at a time; None: no more."""

    def alive(self) -> bool: ...

    def death(self) -> EngineDeadError | None:
        """Why it is not alive; None where it is."""

    def drain(self) -> None:
        """Takes no more requests; what runs goes on."""

    def close(self) -> None: ...


class PendingCalls:
    """Calls that wait for their end, by number; the side of a handle that every handle has."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._sinks: dict[int, DoneSink] = {}

    def add(self, done: DoneSink) -> int:
        """A number for the call, under which `end` finds `done`."""
        call = next(self._numbers)
        self._sinks[call] = done
        return call

    def end(self, call: int, error: PegaError | None) -> None:
        """A call has ended; nothing happens where it has before."""
        done = self._sinks.pop(call, None)
        if done is not None:
            done(error)

    def end_all(self, error: PegaError) -> None:
        """No call will be answered any more."""
        for call in tuple(self._sinks):
            self.end(call, error)
