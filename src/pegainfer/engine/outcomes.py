"""What a committed row means for its sequence: tokens kept, blocks published, an event, perhaps the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pegainfer.contract.errors import InvariantError, PegaError
from pegainfer.contract.event import FinishReason, Timings, TokenEvent, TokenLogprob
from pegainfer.contract.step import Row, StepPlan, StepResult
from pegainfer.engine.counters import Counters
from pegainfer.engine.fairness import DECODE_WEIGHT
from pegainfer.engine.residents import Residents
from pegainfer.engine.sequence import Sequence, Status
from pegainfer.engine.stop import GrammarError, take_tokens

if TYPE_CHECKING:
    from pegainfer.contract.kv_events import KVEventSink
    from pegainfer.engine.cache_events import CacheEvents


class Outcomes:
    """Owns the table of live requests, from `open` until the last of their sequences is finished."""

    def __init__(self, residents: Residents) -> None:
        self.live: dict[str, list[Sequence]] = {}  # unfinished continuations by request
        self.counters = Counters()
        self.num_constrained = 0  # of them, those with a grammar
        self._residents = residents
        self._kvs = [home.kv for home in residents.homes]  # by data-parallel rank
        self._unit = residents.unit
        self._has_windows = self._kvs[0].has_windows
        self._kv_events: CacheEvents | None = None

    def open(self, family: list[Sequence]) -> None:
        self.live[family[0].request.id] = family
        if family[0].matcher is not None:
            self.num_constrained += len(family)

    def commit(
        self, plan: StepPlan, seqs: list[Sequence], result: StepResult, now: float
    ) -> list[TokenEvent]:
        """Applies a plan's result row by row, then frees what waited for the plan."""
        if result.step != plan.step or len(result.tokens) != len(plan.rows):
            raise InvariantError(
                f"result of step {result.step} with {len(result.tokens)} rows "
                f"for plan {plan.step} with {len(plan.rows)} rows"
            )
        events: list[TokenEvent] = []
        errors = result.errors
        plain = not (errors or result.logprobs or result.prompt_logprobs or self._has_windows)
        unit = self._unit
        contended = self._residents.tenants.contended
        extended = 0
        for i, (row, seq, new) in enumerate(zip(plan.rows, seqs, result.tokens, strict=True)):
            seq.flying -= 1
            if row.sample:
                seq.uncommitted -= row.drafts + 1
                if contended:
                    seq.tenant.service += DECODE_WEIGHT
                # Nearly all rows are like this: one more token in the middle of an answer.
                kv = seq.kv
                if plain and kv is not None and len(new) == 1 and seq.matcher is None:
                    tokens = seq.tokens
                    known = len(tokens)
                    if seq.num_prompt < known < seq.limit - 1 and new[0] not in seq.stop_ids:
                        tokens.append(new[0])
                        seq.computed = known
                        if not seq.uncommitted:
                            seq.planned = known
                        if known - kv.published * unit >= unit:
                            self._kvs[seq.data_rank].publish(kv, tokens, known)
                        extended += 1
                        events.append(TokenEvent(request_id=seq.request_id, index=seq.index, tokens=new))
                        continue
            if errors and i in errors:
                self._fail(seq, row, errors[i], now, events, result.error_kinds.get(i))
            elif seq.status is Status.FINISHED:
                if not row.sample and seq.left_kv is not None:  # cancelled in its prefill: the KV is good
                    self._kvs[seq.data_rank].publish(seq.left_kv, seq.tokens, row.start + row.count)
            else:
                self._row(seq, row, i, result, now, events)
            if not seq.flying:
                seq.left_kv = None
        self._residents.retire(plan.step)
        if result.landed or result.failed:
            tiering = self._residents.tiering
            tiering.now = now
            tiering.end_transfers(result.landed, result.failed, result.traffic)
        if self._kv_events is not None:
            self._kv_events.flush()
        self.counters.generation_tokens += extended
        return events

    def publish_kv_events(self, sink: KVEventSink) -> None:
        """Publishes the blocks that prompts can find now, and changes after each commit."""
        from pegainfer.engine.cache_events import CacheEvents

        self._kv_events = CacheEvents(sink, self._kvs)

    def close(self) -> None:
        """Closes the sink of KV events, where there is one."""
        if self._kv_events is not None:
            self._kv_events.close()

    def _row(
        self, seq: Sequence, row: Row, i: int, result: StepResult, now: float, events: list[TokenEvent]
    ) -> None:
        """One row of a sequence that has not ended.

        It may have been preempted since: then its tokens count, and the blocks that it leaves to the cache.
        """
        finish: FinishReason | None = None
        new: tuple[int, ...] = ()
        if seq.prompt_logprobs is not None and i in result.prompt_logprobs:
            seq.take_prompt_logprobs(row.start, result.prompt_logprobs[i])
        if row.sample:
            new = result.tokens[i]
            try:
                taken, finish = take_tokens(seq, new)
            except GrammarError as error:
                self._fail(seq, row, str(error), now, events, error.kind)
                return
            if taken < len(new):
                new = new[:taken]
            # All known tokens but the last were inputs of this row or an earlier one.
            computed = len(seq.tokens) - 1
        else:
            computed = row.start + row.count
            if len(seq.tokens) >= seq.limit and computed == seq.num_prompt - 1:
                finish = FinishReason.LENGTH  # no token was asked for, only the prompt's logprobs
        kv = seq.kv
        if kv is not None:
            seq.computed = computed
            if row.sample and not seq.uncommitted:
                seq.planned = computed
            if computed - kv.published * self._unit >= self._unit:
                self._kvs[seq.data_rank].publish(kv, seq.tokens, computed)
            if self._has_windows and finish is None:
                self._kvs[seq.data_rank].trim(kv, computed, seq.last_step)
        elif seq.left_kv is not None:
            self._kvs[seq.data_rank].publish(seq.left_kv, seq.tokens, computed)
        if finish is not None:
            ended = self.finish(seq, finish, now, new, result.logprobs.get(i))
            if i in result.pooled:
                ended = msgspec.structs.replace(ended, embedding=result.pooled[i])
            events.append(ended)
        elif new:
            self.counters.generation_tokens += len(new)
            logprobs = result.logprobs.get(i)
            first = computed + 1 - len(new) == seq.num_prompt
            if first:
                seq.first_token = now
            if first or logprobs is not None:
                events.append(self._detailed(seq, new, logprobs, first))
            else:
                events.append(TokenEvent(request_id=seq.request.id, index=seq.index, tokens=new))

    def _detailed(
        self, seq: Sequence, new: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None, first: bool
    ) -> TokenEvent:
        """Progress with logprobs; the first tokens also bring what is known of the prompt."""
        return TokenEvent(
            request_id=seq.request.id,
            index=seq.index,
            tokens=new,
            logprobs=None if logprobs is None else logprobs[: len(new)],
            prompt_logprobs=self._prompt_logprobs(seq) if first else None,
            num_cached_tokens=seq.num_cached,
        )

    def finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        now: float,
        new: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        error: str | None = None,
        error_kind: str | None = None,
    ) -> TokenEvent:
        """Ends one continuation, wherever it stands, and gives its one finish event."""
        answered = reason in (FinishReason.STOP, FinishReason.LENGTH)
        first = answered and len(seq.tokens) - len(new) == seq.num_prompt
        if new:
            self.counters.generation_tokens += len(new)
            if first:
                seq.first_token = now
        if seq.status is Status.RUNNING:
            self._residents.leave(seq)
        elif seq.status is Status.WAITING:
            self._residents.waiting.remove(seq)
        elif seq.status is Status.LOADING:
            self._residents.loading.remove(seq)
        family = self.live[seq.request.id]
        family.remove(seq)
        if seq.matcher is not None:
            self.num_constrained -= 1
        if seq.adapter is not None:
            self._residents.adapters.leave(seq.adapter, seq, seq.last_step, holds=seq.holds_adapter)
        if not family:
            del self.live[seq.request.id]
            self._residents.tenants.leave(seq.tenant)
        seq.status = Status.FINISHED
        self.counters.finish(reason, now)
        return TokenEvent(
            request_id=seq.request.id,
            index=seq.index,
            tokens=new,
            logprobs=None if logprobs is None else logprobs[: len(new)],
            prompt_logprobs=self._prompt_logprobs(seq) if first else None,
            num_cached_tokens=seq.num_cached,
            finish=reason,
            stop_token=new[-1] if reason is FinishReason.STOP and new[-1] in seq.stop_ids else None,
            error=error,
            error_kind=error_kind,
            timings=Timings(
                arrival=seq.arrival,
                admitted=seq.admitted,
                scheduled=seq.scheduled,
                first_token=seq.first_token,
                finished=now,
                ready=seq.ready,
                preemptions=seq.preemptions,
            ),
        )

    def end_request(
        self,
        request_id: str,
        reason: FinishReason,
        now: float,
        events: list[TokenEvent],
        *,
        error: str | None = None,
        error_kind: str | None = None,
    ) -> None:
        """Ends all continuations of a request that still live."""
        for seq in tuple(self.live.get(request_id, ())):
            seq.children = []
            events.append(self.finish(seq, reason, now, error=error, error_kind=error_kind))

    def end_adapter_load(self, index: int, error: PegaError | None, now: float) -> list[TokenEvent]:
        """Sequences that wait for an adapter are queued again; they end where it cannot be loaded."""
        adapters, events = self._residents.adapters, list[TokenEvent]()
        if error is None:
            self._residents.queue_again(adapters.loaded(index), holds_adapter=True)
            return events
        message, kind = str(error), type(error).__name__
        for request_id in {seq.request_id: None for seq in adapters.failed(index)}:
            self.end_request(request_id, FinishReason.ERROR, now, events, error=message, error_kind=kind)
        return events

    def end_one(self, request_id: str, index: int, now: float, events: list[TokenEvent]) -> bool:
        """Aborts one continuation if it still lives; False where others are yet to be forked from it."""
        family = self.live.get(request_id, ())
        seq = next((s for s in family if s.index == index), None)
        if seq is None:
            return True
        if seq.children:
            return False
        for parent in family:
            if seq in parent.children:
                parent.children.remove(seq)
        events.append(self.finish(seq, FinishReason.ABORT, now))
        return True

    def _fail(
        self,
        seq: Sequence,
        row: Row,
        message: str,
        now: float,
        events: list[TokenEvent],
        kind: str | None = None,
    ) -> None:
        if seq.status is Status.FINISHED:
            return
        if seq.index == 0 and row.start < seq.num_prompt - 1:
            # The others were or will be forked from what this row wrote, so the whole request fails.
            self.end_request(seq.request.id, FinishReason.ERROR, now, events, error=message, error_kind=kind)
        else:
            events.append(self.finish(seq, FinishReason.ERROR, now, error=message, error_kind=kind))

    @staticmethod
    def _prompt_logprobs(seq: Sequence) -> tuple[TokenLogprob | None, ...] | None:
        have = seq.prompt_logprobs
        if have is None:
            return None
        if len(have) != seq.num_prompt:
            raise InvariantError(f"{len(have)} prompt logprobs for a prompt of {seq.num_prompt} tokens")
        return tuple(have)
