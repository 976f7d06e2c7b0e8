"""From resident state and a step's rows to the inputs of the sampling programs, and from their outputs to
what the scheduler is told. Nothing here runs a program, so that every runner can use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pegainfer.contract.errors import InvariantError, RequestError
from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.step import StepPlan, StepResult
from pegainfer.ops.sample import STATUS_NOT_FINITE, STATUS_NOTHING_LEFT
from pegainfer.runner.slots import Slots
from pegainfer.runner.staging import StagedRows

Array = np.ndarray[Any, Any]

_FAULTS = {
    STATUS_NOT_FINITE: "the model's logits are not finite",
    STATUS_NOTHING_LEFT: (
        "allowed tokens, grammar, bad words and min_tokens leave no token that could be drawn; "
        "remedy: allow more tokens, or fewer bad words and min_tokens"
    ),
}
# A status that stands for a request that asks for what cannot be, by TokenEvent.error_kind.
_KINDS = {STATUS_NOTHING_LEFT: RequestError.__name__}


class Call(NamedTuple):
    """What a program is run on, beside the outputs of the forward pass."""

    inputs: dict[str, Array]
    env: dict[str, int]


class PromptPart(NamedTuple):
    """Prompt tokens of one row whose log-probabilities are asked for."""

    row: int
    targets: Array  # [L] int32
    call: Call


def sampler_call(state: Slots, rows: StagedRows, masks: Mapping[int, bytes]) -> Call:
    """Of the sampling rows, in their order; `logits` is still missing.

    Args:
        masks: row of the plan -> bitmask of allowed tokens.
    """
    slots = rows.slots[rows.sampling]
    known, prompt = state.known[slots], state.num_prompt[slots]
    draws = (known - prompt).astype(np.int32)
    inputs = state.sampling.stage(slots, draws, _by_place(rows, masks))
    inputs |= {
        "slots": slots.astype(np.int32),
        "history_lens": known.astype(np.int32),
        "prompt_lens": prompt.astype(np.int32),
    }
    env = {
        "L": len(slots),
        "J": len(inputs["bias_ids"]),
        "E": len(inputs["masks"]),
        "U": len(inputs["banned_tokens"]),
        "O": len(inputs["banned_seq_lens"]),
    }
    return Call(inputs, env)


class SamplerCalls:
    """`sampler_call` of step after step: where a batch goes on, only draws, lengths and masks are made anew.

    A call's arrays are valid until the next one's, and the same objects where the batch goes on.
    """

    def __init__(self, state: Slots) -> None:
        self._state = state
        self._last: Call | None = None  # one that another step may take up
        self._slots = b""
        self._changes = -1

    def call(self, rows: StagedRows, masks: Mapping[int, bytes]) -> Call:
        """See `sampler_call`."""
        state, slots = self._state, rows.slots[rows.sampling]
        if self._last is None or not self._goes_on(slots):
            call = sampler_call(state, rows, masks)
            self._last = call if state.sampling.plain else None
            self._slots, self._changes = slots.tobytes(), state.sampling.changes
            return call
        inputs, known = self._last.inputs, state.known[slots]
        inputs["history_lens"][:] = known
        inputs["draws"][:] = known - state.num_prompt[slots]
        if masks or self._last.env["E"]:
            inputs |= state.sampling.stage_masks(len(slots), _by_place(rows, masks))
            self._last.env["E"] = len(inputs["masks"])
        return self._last

    def _goes_on(self, slots: Array) -> bool:
        return self._changes == self._state.sampling.changes and slots.tobytes() == self._slots


def _by_place(rows: StagedRows, masks: Mapping[int, bytes]) -> dict[int, bytes]:
    """Masks by place among the sampling rows, in place of the plan's row."""
    if not masks:
        return {}
    places = {row: place for place, row in enumerate(rows.sampling.tolist())}
    return {places[row]: mask for row, mask in masks.items()}


def prompt_parts(state: Slots, rows: StagedRows, largest: int) -> Iterator[PromptPart]:
    """Prompt tokens that follow each computed position, in rows whose requests ask for them; `x` is missing.

    Args:
        largest: tokens a part.
    """
    if not state.sampling.scored:
        return
    asked = state.sampling.prompt_logprobs[rows.slots]
    firsts = np.cumsum(rows.counts) - rows.counts
    # The token after a row's last position is drawn, not given, where the prompt ends.
    stops = np.minimum(rows.starts + rows.counts, state.num_prompt[rows.slots] - 1)
    for row in np.flatnonzero((asked >= 0) & (stops > rows.starts)).tolist():
        start, stop, slot = int(rows.starts[row]), int(stops[row]), int(rows.slots[row])
        first = int(firsts[row])
        targets = state.history[slot, start + 1 : stop + 1]
        for at in range(0, len(targets), largest):
            part = np.ascontiguousarray(targets[at : at + largest])
            inputs = {
                "logit_rows": np.arange(first + at, first + at + len(part), dtype=np.int32),
                "targets": part,
                "top_lens": np.full(len(part), asked[row], np.int32),
            }
            if state.max_adapters:
                inputs["logit_adapters"] = np.full(len(part), state.adapters[slot], np.int32)
            yield PromptPart(row, part, Call(inputs, {"T": rows.env["T"], "L": len(part)}))


def gathered_logprobs(
    parts: Iterable[tuple[PromptPart, Mapping[str, Array]]],
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Of each row that asked for its prompt's; a row's parts come in the order of its tokens.

    Args:
        parts: with what the program gave for each, on the host; read before the next one is asked for.
    """
    found: dict[int, list[TokenLogprob]] = {}
    for part, results in parts:
        entries = token_logprobs(results, part.targets)
        found.setdefault(part.row, []).extend(e for e in entries if e is not None)
    return {row: tuple(entries) for row, entries in found.items()}


def check_sampled_in_time(step: int, last_forward: int) -> None:
    """Raises InvariantError where another forward pass has begun: all write the same logits."""
    if step != last_forward:
        raise InvariantError(f"step {step} is sampled after step {last_forward} has overwritten its logits")


def step_result(
    plan: StepPlan,
    rows: StagedRows,
    drawn: Mapping[str, Array] | None,
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]],
    seconds: float,
    stage_seconds: float,
    pooled: dict[int, bytes] | None = None,
) -> StepResult:
    """What the scheduler is told.

    Args:
        drawn: the sampler's outputs on the host, None where no row samples.
    """
    tokens: list[tuple[int, ...]] = [()] * len(plan.rows)
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    errors: dict[int, str] = {}
    kinds: dict[int, str] = {}
    if drawn is not None:
        singles: list[tuple[int, ...]] = list(zip(drawn["tokens"].tolist(), strict=True))
        if len(singles) == len(tokens):
            tokens = singles
        else:
            for row, single in zip(rows.sampling.tolist(), singles, strict=True):
                tokens[row] = single
        for place in np.flatnonzero(drawn["status"]).tolist():
            row, status = int(rows.sampling[place]), int(drawn["status"][place])
            tokens[row], errors[row] = (), _FAULTS[status]
            if status in _KINDS:
                kinds[row] = _KINDS[status]
        if drawn["ranks"].any():
            best = zip(rows.sampling.tolist(), token_logprobs(drawn, drawn["tokens"]), strict=True)
            logprobs = {row: (entry,) for row, entry in best if entry is not None and row not in errors}
    return StepResult(
        step=plan.step,
        tokens=tuple(tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        pooled=pooled or {},
        errors=errors,
        error_kinds=kinds,
        seconds=seconds,
        stage_seconds=stage_seconds,
    )


def token_logprobs(results: Mapping[str, Array], tokens: Array) -> list[TokenLogprob | None]:
    """One entry a row, None where none was asked for (rank 0)."""
    ranks = results["ranks"].tolist()
    if not any(ranks):
        return [None] * len(ranks)
    columns = (tokens, results["logprobs"], results["top_ids"], results["top_logprobs"])
    rows = zip(ranks, *(c.tolist() for c in columns), strict=True)
    return [
        TokenLogprob(token, logprob, rank, tuple((i, p) for i, p in zip(ids, best, strict=True) if i >= 0))
        if rank
        else None
        for rank, token, logprob, ids, best in rows
    ]
