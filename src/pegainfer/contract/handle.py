"""How the text side reaches an engine, in the same process or behind a socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from pegainfer.contract.errors import EngineDeadError
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.contract.request import GenerateRequest

# Called for every event of a request, in order, from the handle's own thread or event loop: must not block.
EventSink = Callable[[TokenEvent], None]


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

    def alive(self) -> bool: ...

    def death(self) -> EngineDeadError | None:
        """Why it is not alive; None where it is."""

    def drain(self) -> None:
        """Takes no more requests; what runs goes on."""

    def close(self) -> None: ...
