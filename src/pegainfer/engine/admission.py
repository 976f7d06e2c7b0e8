"""From a request to its sequences: checked, hashed, seeded and ranked.

Rank = priority + arrival / aging_seconds, fixed when a request arrives. All ranks age at the same rate, so
comparing these constants is comparing aged priorities: a request is overtaken only by what arrives soon
after and is more urgent, so nobody starves.
"""

from __future__ import annotations

import random
from array import array

import msgspec

from pegainfer.contract.errors import ConfigError, PegaError, QueueFullError, RequestError
from pegainfer.contract.grammar import Matcher
from pegainfer.contract.request import HASH_BYTES, GenerateRequest, hash_blocks, root_hash
from pegainfer.contract.step import RunnerInfo
from pegainfer.engine.check import check_request
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.outcomes import Outcomes
from pegainfer.engine.residents import Residents
from pegainfer.engine.sequence import Sequence

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: multiples of it are spread evenly


def derived_seed(seed: int, index: int) -> int:
    """The seed of continuation `index`: that of index 0 is the request's own."""
    return (seed + index * GOLDEN) & MASK64


class Admission:
    """Numbers sequences and draws the seeds that requests leave open; sees who waits and lives."""

    def __init__(
        self,
        info: RunnerInfo,
        config: SchedulerConfig,
        residents: Residents,
        outcomes: Outcomes,
        rng: random.Random,
    ) -> None:
        """Raises ConfigError where the runner cannot hold one sequence."""
        self._info = info
        self._config = config
        self._residents = residents
        self._outcomes = outcomes
        self._rng = rng
        self._next_number = 0
        # Tokens of a sequence that runs alone; the last one's KV is never needed.
        self.reach = residents.homes[0].kv.reach_alone(info.max_commit) + 1
        if self.reach < 2 or info.max_tokens < 1 or residents.num_slots < 1:
            raise ConfigError("the runner cannot hold one sequence", got=info)

    def admit(self, request: GenerateRequest, now: float, matcher: Matcher | None) -> list[Sequence]:
        """The request's n sequences, which the caller queues; its tenant counts one request more.

        Raises RequestError, QueueFullError; then it is counted as rejected, and nothing is kept of it.

        Args:
            matcher: of the request's grammar where it has one; taken over.
        """
        adapter, digest = None, b""
        try:
            tokens = self._check(request, matcher)
            if request.adapter is not None:
                adapter = self._residents.adapters.find(request.adapter)
                digest = adapter.info.digest
        except PegaError:
            self._outcomes.counters.rejections += 1
            raise
        # Tokenizers may name more tokens than the model has: such an end can never be drawn, and is no index.
        if request.eos_token_ids and max(request.eos_token_ids) >= self._info.vocab_size:
            ends = tuple(t for t in request.eos_token_ids if t < self._info.vocab_size)
            request = msgspec.structs.replace(request, eos_token_ids=ends)
        sampling = request.sampling
        most = self._info.max_model_len if sampling.max_tokens is None else len(tokens) + sampling.max_tokens
        limit = min(most, self._info.max_model_len, self.reach)
        seed = self._rng.getrandbits(64) if sampling.seed is None else sampling.seed & MASK64
        rank = request.priority + now / self._config.aging_seconds
        root = root_hash(digest, request.cache_salt)
        hashes = self._hash(request, root, digest)
        if adapter is not None:
            adapter.live += request.n
        tenant = self._residents.tenants.enter(request.tenant)
        first = self._next_number
        self._next_number += request.n
        return [
            Sequence(
                request,
                tokens=array("i", tokens),
                hashes=hashes,
                number=first + index,
                index=index,
                seed=derived_seed(seed, index),
                limit=limit,
                rank=(rank, first + index),
                now=now,
                tenant=tenant,
                adapter=adapter,
                root=root,
                matcher=matcher if matcher is None or index == 0 else matcher.copy(),
            )
            for index in range(request.n)
        ]

    def _check(self, request: GenerateRequest, matcher: Matcher | None) -> array[int]:
        """Returns the prompt's ids. Raises RequestError, QueueFullError."""
        tokens = check_request(request, self._info, self._config, self._residents.unit, self.reach)
        self._check_room(len(tokens))
        if request.grammar is not None and matcher is None:
            raise RequestError(
                "this engine has no grammar support", got=request.grammar.kind, param="grammar"
            )
        if request.id in self._outcomes.live:
            raise RequestError("a live request has this id", got=request.id[:64], param="request_id")
        return tokens

    def _check_room(self, num_tokens: int) -> None:
        """Raises QueueFullError where so many tokens more are too much; an empty queue takes any request."""
        waiting, loading, config = self._residents.waiting, self._residents.loading, self._config
        queued, count = waiting.num_tokens + loading.num_tokens, len(waiting) + len(loading)
        if count < config.max_waiting_requests and (
            not queued or queued + num_tokens <= config.max_waiting_tokens
        ):
            return
        raise QueueFullError(
            "the queue is full",
            expected=f"at most {config.max_waiting_requests} requests and {config.max_waiting_tokens} tokens",
            got=f"{count} requests and {queued} tokens that wait",
            retry_after=self._outcomes.counters.retry_after(count),
            remedy="try again later",
        )

    def _hash(self, request: GenerateRequest, root: bytes, digest: bytes) -> list[bytes]:
        """Hashes of the prompt's full blocks: those that came with it, else made here.

        Those that came are of no use where they were made for other content of the adapter.
        """
        if not self._config.prefix_cache:
            return []
        raw = request.block_hashes
        if raw and request.adapter_digest == digest:
            return [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]
        return hash_blocks(request.prompt, self._residents.unit, parent=root)
