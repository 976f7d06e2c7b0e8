"""LoRA adapters of the offline API."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from pegainfer.contract.errors import PegaError, RequestError
from pegainfer.contract.handle import DoneSink
from pegainfer.engine.inprocess import InProcessEngine


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for `LLM.generate`, as vLLM has it; it is loaded when it is first named.

    Args:
        lora_int_id: not used; an adapter's name identifies it.
        lora_path: of the folder that PEFT saved.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


def load_missing(engine: InProcessEngine, requests: Iterable[LoRARequest | None]) -> None:
    """Loads those that the engine does not have.

    Raises RequestError for a name that stands for another folder, and what loading raises.
    """
    for request in requests:
        if request is None:
            continue
        if not isinstance(request, LoRARequest):
            raise RequestError("bad lora_request", expected="LoRARequest", got=type(request).__name__)
        path = os.path.abspath(request.lora_path)
        loaded = next((a for a in engine.adapters() if a.name == request.lora_name), None)
        if loaded is None:
            wait(partial(engine.load_adapter, request.lora_name, path))
        elif loaded.path != path:
            raise RequestError(
                "an adapter of this name is loaded from another folder", expected=loaded.path, got=path,
                param="lora_request", remedy="unload it first with unload_lora",
            )  # fmt: skip


def wait(start: Callable[[DoneSink], None]) -> None:
    """Returns when a call to the engine has ended. Raises what it ended with."""
    ends: queue.SimpleQueue[PegaError | None] = queue.SimpleQueue()
    start(ends.put)
    error = ends.get()
    if error is not None:
        raise error
