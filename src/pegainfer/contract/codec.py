"""Messages between front and engine. Each is a frame (contract/frames.py) of msgpack."""

from __future__ import annotations

import msgspec

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import PegaError
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.contract.frames import frame_of
from pegainfer.contract.handle import EngineInfo
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.trace import StepTrace

MAX_FRAME = 64 << 20  # bytes; a longer message means a broken peer
MAX_PROMPT_LOGPROBS = MAX_FRAME // 2  # bytes; those of a request go out in one event


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str
    index: int | None = None  # this continuation alone; None: all of them


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    pass


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """`call` is the front's number of this call, which Done carries."""

    call: int
    name: str
    path: str
    inplace: bool = False  # takes the name from the adapter that has it


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    call: int
    name: str


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    call: int


class Trace(msgspec.Struct, frozen=True, tag="trace"):
    """Front to engine: steps are recorded from now on, or no longer."""

    on: bool


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Engine to front, once, when the first request can be served."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Engine to front: it cannot start or go on. `user_error`: the message alone is for the user."""

    message: str
    user_error: bool = True


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Engine to front: this request was not taken. `kind` names the exception of contract.errors."""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    retry_after: float = 0.0


class Adapters(msgspec.Struct, frozen=True, tag="adapters"):
    """Engine to front: all adapters that are loaded now. Comes before the Done of the call that caused it."""

    adapters: list[AdapterInfo]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Engine to front: a call has ended, with an error as Refused has it or without one (`kind` is None)."""

    call: int
    kind: str | None = None
    message: str = ""
    param: str | None = None
    retry_after: float = 0.0


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Engine to front, at most one a step."""

    events: list[TokenEvent]
    stats: EngineStats | None = None


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """Engine to front: steps that were recorded, in order."""

    steps: list[StepTrace]


Call = LoadAdapter | UnloadAdapter | ResetPrefixCache
ToEngine = Submit | Cancel | Drain | Shutdown | Trace | Call
ToFront = Ready | Failed | Refused | Events | Adapters | Done | Steps

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


def encode_frame(message: ToEngine | ToFront) -> bytes:
    """The frame of a message. Raises PegaError if it is beyond MAX_FRAME."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise PegaError("message too large for one frame", expected=f"≤ {MAX_FRAME} bytes", got=len(body))
    return frame_of(body)


def prompt_logprobs_bytes(num_tokens: int, top: int) -> int:
    """Most bytes that a prompt's logprobs take in a frame, `top` alternatives a token beside its own."""
    return num_tokens * (25 + 15 * top)


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises msgspec.DecodeError."""
    message: ToEngine = _to_engine.decode(body)
    return message


def decode_to_front(body: bytes) -> ToFront:
    """Raises msgspec.DecodeError."""
    message: ToFront = _to_front.decode(body)
    return message
