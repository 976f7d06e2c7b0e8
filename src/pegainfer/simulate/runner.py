"""A runner without a device: it keeps the length of each slot and prices each plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pegainfer.contract.errors import InvariantError, UnsupportedError
from pegainfer.contract.step import RunnerInfo, StepPlan, StepResult
from pegainfer.measure.prices import StepWork

TOKEN_BYTES = 4  # of a prompt's token
FIRST_TOKEN = 256  # answers are made of ids from here on, which no generated prompt has


@dataclass(frozen=True)
class SimulatedStep:
    """A plan that is under way. Implements contract.step.PendingStep; `seconds` is the device's time."""

    result: StepResult

    @property
    def seconds(self) -> float:
        return self.result.seconds

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


class SimulatedRunner:
    """Implements contract.step.Runner. Rows must commit one token each (RunnerInfo.max_commit is 1).

    Args:
        price: seconds of a step.
        works: of all steps so far, and how often each came.
    """

    def __init__(self, info: RunnerInfo, price: Callable[[StepWork], float]) -> None:
        """Raises UnsupportedError for a runner whose rows commit several tokens."""
        if info.max_commit > 1:
            raise UnsupportedError(
                "speculation is not simulated", expected="1 token a row", got=info.max_commit
            )
        self._info = info
        self._price = price
        self._known: dict[int, int] = {}  # slot -> tokens that it knows
        self._span = max(1, info.vocab_size - FIRST_TOKEN)
        self._decoding: tuple[int, ...] = ()  # slots of the last plan, if the next one may repeat it
        self._context = 0  # tokens that these rows read in the last step
        self._repeats = 0  # steps since, by which `_known` of these slots lags
        self.works: Counter[StepWork] = Counter()

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def forward(self, plan: StepPlan) -> SimulatedStep:
        """Prices the plan and draws the tokens that it samples. Raises InvariantError for an unknown slot."""
        # The same for all rows of a step: equal prompts get equal answers only if they run side by side.
        token = (FIRST_TOKEN + plan.step % self._span,)
        if plan.repeats:
            rows = len(self._decoding)
            self._repeats += 1
            self._context += rows
            return self._priced(plan, StepWork(rows, self._context, (), rows), (token,) * rows)
        for slot in self._decoding:
            self._known[slot] += self._repeats
        self._repeats = 0
        for slot in plan.frees:
            del self._known[slot]
        for new in plan.news:
            self._known[new.slot] = len(new.tokens) // TOKEN_BYTES
        return self._rows(plan, token)

    def _rows(self, plan: StepPlan, token: tuple[int]) -> SimulatedStep:
        known = self._known
        context = 0
        decoding: list[int] = []
        chunks: list[tuple[int, int]] = []
        tokens: list[tuple[int, ...]] = []
        for row in plan.rows:
            length = known.get(row.slot)
            if length is None:
                raise InvariantError(f"a row of slot {row.slot}, which holds no sequence")
            if row.sample and row.count == 1:
                decoding.append(row.slot)
                context += length
            else:
                chunks.append((row.start, row.count))
            if row.sample:
                known[row.slot] = length + 1
            tokens.append(token if row.sample else ())
        self._decoding, self._context = (() if chunks else tuple(decoding)), context
        samples = sum(row.sample for row in plan.rows)
        return self._priced(plan, StepWork(len(decoding), context, tuple(chunks), samples), tuple(tokens))

    def _priced(self, plan: StepPlan, work: StepWork, tokens: tuple[tuple[int, ...], ...]) -> SimulatedStep:
        self.works[work] += 1
        seconds = self._price(work) if plan.rows else 0.0
        return SimulatedStep(StepResult(step=plan.step, tokens=tokens, seconds=seconds))

    def sample(self, handle: SimulatedStep, masks: dict[int, bytes] | None = None) -> SimulatedStep:
        return handle

    def close(self) -> None:
        """Nothing is held."""
