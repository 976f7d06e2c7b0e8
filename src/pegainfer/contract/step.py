"""A step as the scheduler plans it and as every runner (CPU, CUDA, null, simulated) executes it.

This is contract version 2. A plan is a delta over state that lives in the runner's slots: token history,
sampling parameters, block tables. The parts of a plan take effect in the order of StepPlan's fields;
transfers alone run beside the steps. Two plans may be uncommitted at any time, so a row may start from a
token that the host has not seen yet (`Row.follow`).

Ranks. With data-parallel attention, `RunnerInfo.data_ranks` ranks have pools of their own. Block ids are
per rank. A slot lives on one rank (`RunnerInfo.rank_of`), and its blocks are blocks of that rank. A plan goes
to all ranks; the result of a data-parallel rank has the rows of its own slots alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from pegainfer.contract.adapter import NO_ADAPTER, AdapterInfo, AdapterLoad
from pegainfer.contract.errors import PegaError
from pegainfer.contract.event import EngineStats, TokenEvent, TokenLogprob
from pegainfer.contract.grammar import Matcher
from pegainfer.contract.request import GenerateRequest, SamplingParams
from pegainfer.contract.tiers import Tier, Traffic, Transfer

NO_BLOCK = -1  # in a window group's table: this block lies before the window and is never read


class PageGroup(msgspec.Struct, frozen=True, kw_only=True):
    """KV in pages of `block_size` tokens. `window` > 0: only the last so many tokens are ever read."""

    name: str
    block_size: int
    bytes_per_block: int
    window: int = 0


class StateGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A recurrent state, one for each sequence. Copies of it (`StateSnapshot`) make prefixes reusable."""

    name: str
    bytes_per_state: int
    # A prompt's state is kept at multiples of so many tokens, and besides at the prompt's last block boundary
    # and at that of the answer. A multiple of every page group's block size; 0: never kept.
    snapshot_every: int = 0


class KVSpec(msgspec.Struct, frozen=True):
    """What a model line keeps for each sequence; a prefix hit must be valid in all groups."""

    groups: tuple[PageGroup | StateGroup, ...]


class RunnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner can hold, fixed at start. The scheduler plans within these bounds."""

    kv: KVSpec
    num_blocks: tuple[int, ...]  # blocks (or states) for each group and data-parallel rank, ids 0..n-1
    max_slots: int  # sequences with resident state, over all ranks; a multiple of data_ranks
    max_tokens: int  # positions that the rows of a step compute, summed, for each data-parallel rank
    # Totals that a step with a prompt in it is best filled up to, ascending: the first beside decodes while
    # little waits, the last otherwise; (): max_tokens.
    fill_tokens: tuple[int, ...] = ()
    max_model_len: int  # tokens of a sequence, prompt and output
    vocab_size: int
    max_commit: int = 1  # tokens that one row may commit (above 1 with speculation)
    supports_prompt_logprobs: bool = True
    supports_pooling: bool = False  # of hidden states, see SamplingParams.pooling
    counts_experts: bool = False  # the runner is a CountingRunner
    tiers: tuple[Tier, ...] = ()  # below the device, the fastest first; evicted blocks move down one by one
    max_adapters: int = 0  # adapters installed at once; above 0 the runner is an AdapterRunner
    max_host_adapters: int = 0  # adapters that are kept in the host's memory, ready to be installed
    max_adapter_rank: int = 0  # the greatest rank of an adapter's matrices
    data_ranks: int = 1  # data-parallel ranks, each with pools of its own

    def rank_of(self, slot: int) -> int:
        """The data-parallel rank on which a slot lives: equal runs of slots, in order."""
        return slot * self.data_ranks // self.max_slots


class NewSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence enters a slot, for the first time or after a preemption."""

    slot: int
    seq: int  # engine-wide number of the sequence, never reused
    tokens: bytes  # int32 LE: the prompt, then what was generated before a preemption
    num_prompt: int  # how many of them are prompt
    sampling: SamplingParams
    seed: int  # 64 bits; with the count of generated tokens it names each random number
    mask_tokens: tuple[int, ...] = ()  # EOS and stop ids, masked until min_tokens are generated
    adapter: int = NO_ADAPTER  # index of the adapter that all rows of this slot use


class SlotBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to a slot's table for one group (for a state group: the slot's state id).

    After a prefix hit, a window group's table begins with NO_BLOCK entries.
    """

    slot: int
    group: int
    blocks: tuple[int, ...]


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """One block (or state) is copied within a device pool before any row runs.

    A fork copies its parent's last partial block and state; a prefix hit copies a snapshot into the slot's
    state.
    """

    group: int
    src: int
    dst: int
    rank: int = 0  # data-parallel rank whose pool this is


class StateSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Keeps the state of `slot` as of its first `position` tokens in pool state `state` of the same rank.

    `position` is a multiple of the block size in (start, start + count + drafts] of the slot's row in this
    plan. The state is written exactly if the row passes the position with tokens that stay, i.e. if it really
    starts before `position` and its committed tokens reach it; otherwise `state` keeps its content.
    A snapshot whose row may or may not pass its position is repeated in each plan until one does.
    """

    slot: int
    group: int
    position: int  # tokens
    state: int


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute positions [start, start + count + drafts) of a slot.

    Known tokens are those of NewSlot.tokens plus those that the runner sampled since. `sample` says that
    position start + count - 1 is the last known token and that the row draws what follows.

    Rows with drafts compute `drafts` positions more, for tokens that the runner itself proposes, and commit
    0 to drafts + 1 tokens: the accepted ones and one that is drawn. How many it committed stays on the
    device, where the next row needs it, and reaches the host with the result. Afterwards page groups hold
    the accepted positions (what lies beyond is overwritten later), and state groups hold the state as of the
    last accepted token, i.e. of all known tokens but the last.

    With `follow`, an earlier uncommitted plan has a sampling row of this slot: `start` is then the highest
    that it can be, and the runner starts at its own last known token.
    """

    slot: int
    start: int
    count: int
    sample: bool
    follow: bool = False
    drafts: int = 0  # at most RunnerInfo.max_commit - 1, and no further than the slot's tables reach


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Immutable, plain integers, so that it can be broadcast to ranks and logged."""

    step: int  # counts up by one
    frees: tuple[int, ...] = ()  # slots whose state is dropped
    news: tuple[NewSlot, ...] = ()
    blocks: tuple[SlotBlocks, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    # Tiers forget what they hold before this plan's transfers start; what is on its way to them is not kept.
    reset_tiers: bool = False
    transfers: tuple[Transfer, ...] = ()  # started by this plan; they may end during any later one
    rows: tuple[Row, ...] = ()
    snapshots: tuple[StateSnapshot, ...] = ()  # states that the rows leave beside those of their slots
    # The slots of the step before in the same order, each at its last known token, with the same drafts; all
    # sample, none obeys a grammar. The rows say the same, so a runner need not compare them.
    repeats: bool = False
    # There are no rows: the result comes when a transfer in flight has ended, or after TRANSFER_WAIT_SECONDS.
    wait_transfers: bool = False

    @property
    def num_tokens(self) -> int:
        """Positions that the rows compute, drafts included."""
        return sum([r.count + r.drafts for r in self.rows])


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step produced, row by row in the plan's order."""

    step: int
    tokens: tuple[tuple[int, ...], ...]  # 0..drafts+1 ids a row; () for rows that do not sample
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}  # row -> one a token, where asked for
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}  # row -> of tokens start+1 .. start+count
    pooled: dict[int, bytes] = {}  # sampling row -> float32 LE, of a whole prompt whose request asks for it
    errors: dict[int, str] = {}  # row -> why this sequence alone failed (non-finite logits, a bad adapter)
    error_kinds: dict[int, str] = {}  # of them, those that are no fault of ours: row -> TokenEvent.error_kind
    seconds: float = 0.0  # wall time on the device
    stage_seconds: float = 0.0  # of the host, turning the plan into the device's arrays
    cold_seconds: float = 0.0  # of the host, making a graph of sizes that the start had no time for
    landed: tuple[int, ...] = ()  # ids of transfers that ended well since the result before
    failed: dict[int, str] = {}  # transfers that failed since the result before: id -> reason
    traffic: tuple[Traffic, ...] = ()  # of those that landed


class PendingStep(Protocol):
    """A step under way on the device."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> StepResult:
        """Blocks until the step ended. Raises what the device raised."""


class Runner(Protocol):
    """A model on a device. Called from one thread; forward and sample return before the work is done."""

    @property
    def info(self) -> RunnerInfo: ...
    def forward(self, plan: StepPlan) -> Any:
        """Applies the plan's deltas and starts the forward pass; the handle goes to `sample` once."""

    def sample(self, handle: Any, masks: dict[int, bytes] | None = None) -> PendingStep:
        """Starts sampling. `masks`: row -> bits of allowed tokens, lowest first, in ceil(V/32) words."""

    def close(self) -> None: ...


@runtime_checkable
class Preparing(Protocol):
    """A runner with more to make ready than its start takes time for."""

    def prepare(self) -> bool:
        """Makes one thing more ready, within some 0.1 s, while no step is in flight; False: nothing is left.

        What was not made ready is made when a step first needs it.
        """


class Constraint(NamedTuple):
    """What a sampling row must obey beside its sampling parameters."""

    matcher: Matcher
    may_end: bool  # EOS counts as the end of the text


class StepPolicy(Protocol):
    """The scheduler's interface. Pure: no clock, no device, no I/O; time is an argument (seconds)."""

    def add(
        self, request: GenerateRequest, now: float, matcher: Matcher | None = None, ready: float = 0.0
    ) -> None:
        """Queues a request. Raises RequestError, QueueFullError; nothing is kept in that case.

        Args:
            matcher: of the request's grammar where it has one; taken over.
            ready: when that was compiled; 0: there was nothing to wait for.
        """

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends a request's sequences, or the one of `index`, at the next `schedule`."""

    def schedule(self, now: float) -> tuple[StepPlan | None, list[TokenEvent]]:
        """The next plan, None if there is nothing to do, and events of sequences that end without one."""

    def constrained(self) -> dict[int, Constraint]:
        """Rows of the newest uncommitted plan whose tokens a grammar bounds, by their place in the plan.

        One that follows (`Row.follow`) must be asked for again after the commit of the plan before.
        """

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Takes the oldest uncommitted plan's result."""

    def add_adapter(self, info: AdapterInfo) -> None:
        """Lets requests name an adapter. Raises RequestError where the name is taken."""

    def drop_adapter(self, name: str) -> bool:
        """Takes no more requests for an adapter, or raises RequestError; whether taken ones still need it."""

    def take_adapter_loads(self) -> list[AdapterLoad]:
        """Adapters to install, each once, under indices that no plan in flight uses."""

    def end_adapter_load(self, index: int, error: PegaError | None, now: float) -> list[TokenEvent]:
        """A load has ended: sequences that wait for it go on, or end with `error`; the index is free then."""

    def take_unloaded_adapters(self) -> list[AdapterInfo]:
        """Dropped adapters that no sequence and no plan in flight uses any more; each once."""

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes in every tier; what runs now publishes nothing any more."""

    def has_work(self) -> bool: ...

    def price(self, plan: StepPlan) -> tuple[float, float]:
        """Device seconds that a plan should take, and those of its decode rows alone; 0 where unknown."""

    def stats(self) -> EngineStats:
        """A snapshot of the counters; what only the loop knows (host_seconds) is left empty."""


class Tracer(Protocol):
    """Where the engine reports what it did; the null tracer costs one call."""

    def step(self, plan: StepPlan, result: StepResult, now: float) -> None: ...
