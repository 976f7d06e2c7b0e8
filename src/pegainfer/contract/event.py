"""What comes back from the engine: token ids, never text."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from pegainfer.contract.errors import PegaError, error_fields, restored_error
from pegainfer.contract.experts import ExpertTokens
from pegainfer.contract.peers import PeerStats


class FinishReason(StrEnum):
    STOP = "stop"  # EOS or a stop token id
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # cancelled by the client or at shutdown
    ERROR = "error"  # this request failed alone; TokenEvent.error says why


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, of the raw logits' softmax (before bias and penalties)."""

    token: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...] = ()  # the k best as (id, logprob), best first


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """CLOCK_MONOTONIC seconds at each door; 0.0 where not reached."""

    arrival: float = 0.0
    admitted: float = 0.0  # the engine took it from its inbox
    scheduled: float = 0.0  # first step that computes any of its tokens
    first_token: float = 0.0
    finished: float = 0.0
    ready: float = 0.0  # its grammar was compiled; with `admitted` where there was nothing to compile
    preemptions: int = 0  # times that it lost its blocks to another sequence


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Progress of one continuation. Exactly one event an index carries `finish`, and it is the last."""

    request_id: str
    index: int = 0  # which of n
    tokens: tuple[int, ...] = ()  # 0..k new ids; a stop id that ended the sequence is included
    logprobs: tuple[TokenLogprob, ...] | None = None  # one a token, if asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # once, with the first event of index 0
    num_cached_tokens: int = 0  # of the prompt, from the prefix cache; with the first tokens and the finish
    embedding: bytes | None = None  # float32 LE, with the finish, where SamplingParams.pooling asked for it
    finish: FinishReason | None = None
    stop_token: int | None = None  # the id that ended it, where finish is STOP
    error: str | None = None  # where finish is ERROR
    error_kind: str | None = None  # the exception of contract.errors it stands for; None: a fault of ours
    error_param: str | None = None  # the request's field to blame, where error_kind is RequestError
    retry_after: float = 0.0  # seconds, where error_kind is QueueFullError
    timings: Timings | None = None  # with the finish


def error_events(request_id: str, indices: Iterable[int], error: PegaError) -> list[TokenEvent]:
    """The ERROR event of each index of a request that ends with an error."""
    kind, message, param, retry_after = error_fields(error)
    return [
        TokenEvent(
            request_id=request_id,
            index=index,
            finish=FinishReason.ERROR,
            error=message,
            error_kind=kind,
            error_param=param,
            retry_after=retry_after,
        )
        for index in indices
    ]


def error_of(event: TokenEvent) -> PegaError:
    """The exception that an ERROR event stands for; of a fault of ours, the root of all."""
    message = event.error or "the request failed"
    return restored_error(event.error_kind, message, event.error_param, event.retry_after)


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One memory tier below the device, over all KV groups and ranks. Totals count since the engine's start.

    Bytes and seconds are those of one rank, since all ranks move their parts at the same time.
    """

    kind: str  # see Tier
    total_blocks: int = 0  # blocks and states
    cached_blocks: int = 0
    in_flight: int = 0  # transfers to or from it that have not ended; 0 or more of them wait
    hit_tokens: int = 0  # prompt tokens whose pages were loaded from it
    failures: int = 0  # transfers to or from it that failed
    loaded_bytes: int = 0  # read from it
    loaded_seconds: float = 0.0  # summed over copies, which may overlap
    saved_bytes: int = 0
    saved_seconds: float = 0.0
    refused_loads: int = 0  # prefixes that were computed because loading them would have taken longer


PRICE_RATIOS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
SLOW_RATIO = 1.5


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for /metrics, /load and /ready. Totals count since the engine's start."""

    running: int = 0  # sequences with a slot
    waiting: int = 0  # sequences without one
    loading: int = 0  # of these, sequences that wait for their adapter, or their prefix from a lower tier
    free_blocks: int = 0  # of the first KV group
    total_blocks: int = 0
    steps: int = 0
    last_step: float = 0.0  # CLOCK_MONOTONIC seconds of the last commit
    in_flight: int = 0  # plans sent but not committed
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    rejections: int = 0  # refused at the engine's door
    adapter_loads: int = 0  # adapters that were brought into a slot of the device
    finished: dict[str, int] = {}  # by finish reason
    step_seconds: float = 0.0  # summed wall time of committed steps
    kind_steps: dict[str, int] = {}  # steps by kind: decode, prefill, mixed
    kind_seconds: dict[str, float] = {}  # and their summed wall time
    step_sizes: tuple[int, ...] = ()  # steps of 2^(i-1) to 2^i - 1 tokens, by i; the last one of all larger
    step_tokens: int = 0  # computed in all steps
    # Steps by the ratio of their device time to the price that those before them had set, as PRICE_RATIOS
    # bounds it; the last one of all larger. All steps with a prompt count, and a sample of the others.
    price_ratios: tuple[int, ...] = ()
    price_ratio_sum: float = 0.0
    slow_steps: int = 0  # of these, steps that took SLOW_RATIO times their price or more
    tiers: tuple[TierStats, ...] = ()  # below the device, the fastest first
    peers: tuple[PeerStats, ...] = ()  # prefill peers of a decode engine
    # Summed by stage: schedule, launch, mask, wait, commit, emit; and stage, which a GPU's launch contains.
    host_seconds: dict[str, float] = {}
    experts: ExpertTokens | None = None  # where the runner counts them
    rank_seconds: tuple[float, ...] = ()  # of each of several ranks, in steps
