"""One continuation of one request, as the scheduler follows it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from enum import Enum

import msgspec

from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.grammar import Matcher
from pegainfer.contract.peers import PeerBlock
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.adapters import Adapter
from pegainfer.engine.fairness import Tenant
from pegainfer.kv.eviction import Owner
from pegainfer.kv.tables import SequenceBlocks

Rank = tuple[float, int]  # lower runs first; a total order, fixed at arrival but for `Residents.enter`


class Status(Enum):
    HELD = "held"  # waits to be forked from its parent
    WAITING = "waiting"  # in the queue, new or preempted
    LOADING = "loading"  # waits for its adapter, a peer, or its prefix from a lower tier
    RUNNING = "running"  # owns a slot and block tables
    FINISHED = "finished"  # its finish event is out; rows in flight are wasted


class PeerWait(msgspec.Struct, eq=False):
    """What a sequence knows of the peer that prefills its prompt."""

    blocks: list[PeerBlock] = msgspec.field(default_factory=list)  # that the peer has offered
    fresh: bool = False  # the peer has said something that no load has looked at
    loading: bool = False  # a load is under way
    ended: bool = False  # the peer offers no more


class Sequence:
    """Known tokens are `tokens`; of these, `computed` have their KV written as of the last commit.

    `planned` runs ahead of `computed` by the rows in flight. While a sampling row is in flight, neither its
    tokens nor its position are known exactly, and `planned` is not used: see `Row.follow`. `uncommitted`
    tokens are then the most that the rows in flight can add.
    """

    __slots__ = (
        "adapter",
        "admitted",
        "arrival",
        "children",
        "computed",
        "data_rank",
        "entered",
        "first_token",
        "flying",
        "hashes",
        "holds_adapter",
        "index",
        "kv",
        "last_step",
        "left_kv",
        "limit",
        "loaded",
        "mask_tokens",
        "matcher",
        "min_stop",
        "num_cached",
        "num_prompt",
        "number",
        "peer",
        "planned",
        "preemptions",
        "prompt_logprobs",
        "rank",
        "ready",
        "request",
        "request_id",
        "root",
        "scheduled",
        "seed",
        "slot",
        "status",
        "stop_ids",
        "tenant",
        "tokens",
        "uncommitted",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        tokens: array[int],
        hashes: Seq[bytes],
        number: int,
        index: int,
        seed: int,
        limit: int,
        rank: Rank,
        now: float,
        tenant: Tenant,
        adapter: Adapter[Sequence] | None = None,
        root: bytes,
        matcher: Matcher | None = None,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.request_id = request.id
        self.tenant = tenant  # whose service it counts as
        self.number = number  # engine-wide, never reused
        self.index = index  # which of n
        self.seed = seed
        self.rank = rank
        self.tokens = tokens  # prompt, then generated
        self.num_prompt = len(tokens)
        self.limit = limit  # tokens, prompt included, at which it ends
        self.adapter = adapter  # one of its live sequences until it is finished
        self.holds_adapter = False  # keeps it in its slot, from its first admission until it is finished
        self.root = root  # parent of the first hash
        self.hashes = hashes  # of the prompt's full blocks
        eos = () if sampling.ignore_eos else request.eos_token_ids
        self.mask_tokens = tuple(dict.fromkeys(eos + sampling.stop_token_ids))
        self.stop_ids = frozenset(self.mask_tokens)
        self.matcher = matcher  # of its grammar; has accepted what was generated, but for a stop id
        self.min_stop = self.num_prompt + sampling.min_tokens  # a stop id counts only beyond so many tokens
        self.status = Status.WAITING
        self.slot = -1
        self.data_rank = 0  # where it runs, or ran last: while rows are in flight it enters no other
        self.kv: SequenceBlocks | None = None
        # After a preemption, while rows that wrote it are in flight.
        self.left_kv: SequenceBlocks | None = None
        self.computed = 0
        self.planned = 0
        self.flying = 0  # rows in uncommitted plans
        self.uncommitted = 0  # tokens that they may commit at most; 0 where none of them samples
        self.last_step = 0  # the last plan that has a row of it
        self.children: list[Sequence] = []  # HELD, forked when all but the last prompt token is computed
        self.peer: PeerWait | None = None  # while it waits for a peer's prefill
        self.loaded = False  # a prefix was loaded for it since it last ran: once is enough
        # What its events carry
        self.entered = False  # whether it was admitted before: the first time counts in statistics
        self.num_cached = 0  # prompt tokens from the prefix cache at the first admission
        wants = sampling.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if wants else None
        self.arrival = request.arrival or now
        self.admitted = self.ready = now
        self.preemptions = 0
        self.scheduled = self.first_token = 0.0

    @property
    def owner(self) -> Owner:
        """On whose account its blocks are kept in lower tiers."""
        return Owner(self.request.priority, self.request.tenant)

    @property
    def target(self) -> int:
        """Positions to compute before anything is sampled: all known ones, or all but the last of them.

        The last prompt token waits while children are to be forked (each computes it for itself), and is
        never needed when no token is asked for.
        """
        known = len(self.tokens)
        return known - 1 if self.children or known >= self.limit else known

    @property
    def may_use_prefix(self) -> bool:
        """Prompt logprobs need every position to be computed, until they are complete; so does a mean."""
        if self.request.sampling.pooling == "mean":
            return False
        return self.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt

    def packed_tokens(self) -> bytes:
        """int32 little-endian bytes of all known tokens."""
        return pack_tokens(self.tokens)

    def runner_sampling(self) -> SamplingParams:
        """What the runner is told: prompt logprobs are asked of one sequence, until they are complete."""
        sampling = self.request.sampling
        wanted = self.prompt_logprobs
        if sampling.prompt_logprobs is None or (wanted is not None and len(wanted) < self.num_prompt):
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=None)

    def take_prompt_logprobs(self, start: int, values: Seq[TokenLogprob]) -> None:
        """Appends those of tokens start+1 …; what a recomputation repeats is skipped."""
        have = self.prompt_logprobs
        if have is None:
            return
        skip = len(have) - (start + 1)
        have.extend(values[skip : skip + self.num_prompt - len(have)])
