"""Grammars in the whole engine, on the null device: every answer obeys, and nobody else notices."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pegainfer.app.grammars import LLGuidanceGrammars, LLGuidanceMatcher
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.grammar import GrammarFactory, Matcher
from pegainfer.contract.request import GenerateRequest, GrammarSpec, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.frontend.grammar.compiler import MAX_CHOICES, GrammarJob, Kind, compile_grammar
from pegainfer.frontend.grammar.vocabulary import ll_tokenizer, vocabulary_of
from pegainfer.null.model import NullModel
from tests.support.null_engine import null_engine

TOKENIZER = byte_tokenizer()
VOCABULARY = vocabulary_of(TOKENIZER)
EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "ü"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def factory() -> LLGuidanceGrammars:
    return LLGuidanceGrammars(lambda: VOCABULARY, 258)


def spec(kind: Kind, grammar: Any) -> GrammarSpec:
    source = grammar if isinstance(grammar, str) else json.dumps(grammar)
    return GrammarSpec(kind, compile_grammar(GrammarJob(kind, source), ll_tokenizer(VOCABULARY)))


JSON = spec("json_schema", SCHEMA)
LETTERS = spec("regex", "[a-z]*")


def request(
    id: str, grammar: GrammarSpec | None, *, n: int = 1, deadline: float | None = None, **sampling: Any
) -> GenerateRequest:
    sampling.setdefault("seed", sum(id.encode()))
    sampling.setdefault("max_tokens", 400)
    return GenerateRequest(
        id=id,
        prompt=pack_tokens([1, 2, 3]),
        sampling=SamplingParams(**sampling),
        n=n,
        eos_token_ids=(EOS,),
        grammar=grammar,
        deadline=deadline,
    )


class Answers:
    """Collects events of any requests of one engine."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finish: dict[tuple[str, int], TokenEvent] = {}
        self.logprobs = 0

    def submit(self, *requests: GenerateRequest) -> None:
        for r in requests:
            for index in range(r.n):
                self.tokens[r.id, index] = []
            self._engine.submit(r, self._events.put)

    @property
    def pending(self) -> int:
        """Events that nobody has looked at yet."""
        return self._events.qsize()

    def wait(self) -> Answers:
        while len(self.finish) < len(self.tokens):
            event = self._events.get(timeout=60)
            key = event.request_id, event.index
            self.tokens[key] += event.tokens
            self.logprobs += len(event.logprobs or ())
            if event.finish is not None:
                self.finish[key] = event
        return self

    def text(self, id: str, index: int = 0) -> str:
        event, tokens = self.finish[id, index], self.tokens[id, index]
        assert event.error is None, event.error
        return TOKENIZER.decode(tokens[:-1] if event.stop_token is not None else tokens)


def valid(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["a", "b"] and 0 <= value["a"] <= 99 and value["b"] in ("x", "ü")


@pytest.mark.parametrize("depth", [1, 2])
def test_all_obey_among_others_under_preemption(depth: int) -> None:
    """The others get what they get alone; a pool of 14 blocks for 24 sequences preempts again and again."""
    config = SchedulerConfig(pipeline_depth=depth)
    with null_engine(config, grammars=factory(), num_blocks=(14,), max_model_len=192) as engine:
        answers = Answers(engine)
        free = [request(f"free {i}", None, max_tokens=80) for i in range(8)]
        bound = [request(f"bound {i}", JSON, n=2, max_tokens=180) for i in range(8)]
        answers.submit(*(r for pair in zip(free, bound, strict=True) for r in pair))
        answers.wait()
        assert engine.stats().preemptions > 0
    for r in bound:
        for index in range(2):
            assert answers.finish[r.id, index].finish is FinishReason.STOP
            assert valid(answers.text(r.id, index))
    assert answers.text(bound[0].id, 0) != answers.text(bound[0].id, 1)
    for r in free:
        alone = NullModel().continuation(
            [1, 2, 3], r.sampling, r.sampling.seed or 0, eos_token_ids=(EOS,), max_model_len=192
        )
        assert answers.tokens[r.id, 0] == alone


def test_depths_agree() -> None:
    texts = []
    for depth in (1, 2):
        with null_engine(SchedulerConfig(pipeline_depth=depth), grammars=factory()) as engine:
            answers = Answers(engine)
            answers.submit(*(request(str(i), JSON, n=3) for i in range(5)))
            answers.wait()
            texts.append(answers.tokens)
    assert texts[0] == texts[1]


def test_logprobs_come_with_every_token() -> None:
    with null_engine(grammars=factory()) as engine:
        answers = Answers(engine)
        answers.submit(request("a", JSON, logprobs=2))
        answers.wait()
    assert answers.logprobs == len(answers.tokens["a", 0]) > 0


def test_the_end_of_the_grammar_ends_without_a_stop_token() -> None:
    with null_engine(grammars=factory()) as engine:
        answers = Answers(engine)
        answers.submit(
            request("exact", spec("choice", ["yes"]), max_tokens=3),  # complete at the very limit
            request("more", spec("choice", ["yes"]), min_tokens=50),  # a grammar's end outweighs min_tokens
            request("short", spec("choice", ["yes"]), max_tokens=2),
        )
        answers.wait()
    assert {id: (e.finish, e.stop_token) for (id, _), e in answers.finish.items()} == {
        "exact": (FinishReason.STOP, None),
        "more": (FinishReason.STOP, None),
        "short": (FinishReason.LENGTH, None),
    }
    assert answers.text("exact") == answers.text("more") == "yes"


def test_eos_only_where_the_grammar_accepts_and_min_tokens_allow() -> None:
    with null_engine(grammars=factory(), model=NullModel(eos_every=2)) as engine:
        answers = Answers(engine)
        answers.submit(
            *(request(f"any {i}", LETTERS, min_tokens=7) for i in range(20)),
            *(request(f"three {i}", spec("regex", "[a-z]{3,}"), max_tokens=200) for i in range(20)),
            request("never", LETTERS, ignore_eos=True, max_tokens=300),
        )
        answers.wait()
    for (id, index), event in answers.finish.items():
        text = answers.text(id, index)
        assert text.isalpha() and text.islower()
        least = {"any": 7, "three": 3, "never": 300}[id.split()[0]]
        assert len(text) >= least
        assert event.finish is (FinishReason.LENGTH if id == "never" else FinishReason.STOP)


@pytest.mark.parametrize("field", [{"allowed_token_ids": (97,)}, {"bad_words": ((97,),)}])
def test_what_could_leave_nothing_to_draw_is_refused(field: dict[str, Any]) -> None:
    with null_engine(grammars=factory()) as engine:
        answers = Answers(engine)
        answers.submit(request("a", LETTERS, **field))
        answers.wait()
    event = answers.finish["a", 0]
    assert event.error_kind == "RequestError" and event.error_param == next(iter(field))


def test_an_engine_without_grammars_refuses_them() -> None:
    with null_engine() as engine:
        answers = Answers(engine)
        answers.submit(request("a", LETTERS))
        answers.wait()
    assert "no grammar support" in (answers.finish["a", 0].error or "")


class Gated:
    """A factory whose compile waits, and whose masks may fail."""

    def __init__(self) -> None:
        self.inner: GrammarFactory = factory()
        self.compiling = threading.Event()
        self.go_on = threading.Event()
        self.compiled = 0
        self.fail: BaseException | None = None

    def known(self, spec: GrammarSpec) -> Matcher | None:
        return self.inner.known(spec)

    def compile(self, spec: GrammarSpec) -> Matcher:
        self.compiling.set()
        assert self.go_on.wait(60)
        self.compiled += 1
        return self.inner.compile(spec)

    def masks(self, matchers: Sequence[Matcher], *, ends: Sequence[bool]) -> list[bytes | None]:
        if self.fail is not None:
            raise self.fail
        return self.inner.masks(matchers, ends=ends)


@contextmanager
def compiling(
    asked: GenerateRequest,
    config: SchedulerConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[InProcessEngine, Gated, Answers]]:
    """An engine that has begun to compile the grammar of `asked`, and waits."""
    gated = Gated()
    with null_engine(config, grammars=gated, clock=clock) as engine:
        answers = Answers(engine)
        answers.submit(asked)
        assert gated.compiling.wait(60)
        yield engine, gated, answers


def test_others_run_while_a_grammar_compiles() -> None:
    with compiling(request("slow", JSON)) as (engine, gated, slow):
        quick = Answers(engine)
        quick.submit(request("quick", None))
        quick.wait()
        gated.go_on.set()
        assert valid(slow.wait().text("slow"))


def test_a_request_is_cancelled_while_its_grammar_compiles() -> None:
    with compiling(request("a", JSON, n=2)) as (engine, gated, answers):
        engine.cancel("a")
        answers.wait()
        assert {e.finish for e in answers.finish.values()} == {FinishReason.ABORT}
        gated.go_on.set()
        again = Answers(engine)
        again.submit(request("a", JSON))
        assert valid(again.wait().text("a"))


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled() -> None:
    with compiling(request("first", JSON)) as (engine, gated, answers):
        gone = Answers(engine)
        for i in range(5):
            gone.submit(request(f"gone {i}", LETTERS))
            engine.cancel(f"gone {i}")
        gone.wait()
        answers.submit(request("last", spec("regex", "[0-9]{3}")))
        gated.go_on.set()
        answers.wait()
        assert valid(answers.text("first")) and answers.text("last").isdecimal()
        assert gated.compiled == 2


def test_a_choice_of_as_many_as_a_request_may_have() -> None:
    options = [f"choice {i}" for i in range(MAX_CHOICES)]
    with null_engine(grammars=factory()) as engine:
        answers = Answers(engine)
        answers.submit(request("a", spec("choice", options)))
        assert answers.wait().text("a") in options


def test_a_grammar_that_grows_too_complex_is_its_requests_fault() -> None:
    numbers = {f"p{i}": {"type": "integer"} for i in range(3000)}
    wide = spec("json_schema", {"type": "object", "properties": numbers, "additionalProperties": False})
    with null_engine(grammars=factory()) as engine:
        answers = Answers(engine)
        answers.submit(request("a", wide), request("b", JSON))
        answers.wait()
    assert (answers.finish["a", 0].finish, answers.finish["a", 0].error_kind) == ("error", "RequestError")
    assert valid(answers.text("b"))


def test_a_grammar_that_many_wait_for_is_compiled_once() -> None:
    with compiling(request("first", JSON)) as (_, gated, answers):
        answers.submit(*(request(f"r{i}", JSON) for i in range(5)))
        gated.go_on.set()
        answers.wait()
        assert all(valid(answers.text(f"r{i}")) for i in range(5))
        assert gated.compiled == 1


def test_what_is_kept_of_grammars_is_bounded_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = factory()
    some = [spec("regex", f"[a-z]{{{i}}}") for i in range(1, 5)]
    monkeypatch.setattr("pegainfer.app.grammars.MAX_KEPT_BYTES", 2 * len(some[0].text))
    for each in some:
        grammars.compile(each)
        grammars.compile(each)  # again: it counts once
    assert [grammars.known(each) is not None for each in some] == [False, False, True, True]
    grammars.compile(JSON)  # larger than what is kept of all together
    assert grammars.known(JSON) is not None and grammars.known(some[-1]) is None


def test_one_index_is_cancelled_while_the_grammar_compiles() -> None:
    with compiling(request("a", JSON, n=2)) as (engine, gated, answers):
        engine.cancel("a", 1)
        gated.go_on.set()
        assert valid(answers.wait().text("a", 0))
        assert answers.finish["a", 1].finish is FinishReason.ABORT


def test_a_cancel_waits_for_its_own_request_and_not_for_one_before_it_of_the_same_name() -> None:
    with compiling(request("a", JSON)) as (engine, gated, first):
        engine.cancel("a")
        first.wait()
        again = Answers(engine)
        again.submit(request("a", JSON, n=2))
        engine.cancel("a", 1)
        gated.go_on.set()
        assert valid(again.wait().text("a", 0))
        assert again.finish["a", 1].finish is FinishReason.ABORT


def late(answers: Answers, id: str, n: int) -> str:
    """The error that all n indices ended with, which is a deadline's."""
    ends = [answers.finish[id, index] for index in range(n)]
    (told,) = {(e.finish, e.error_kind, e.error) for e in ends}
    assert told[:2] == (FinishReason.ERROR, "DeadlineError")
    return told[2] or ""


class Clock:
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_ends_a_request_while_its_grammar_compiles() -> None:
    """Nothing but time wakes the idle engine; the compile goes on, and what it makes is kept."""
    clock = Clock()
    with compiling(request("a", JSON, n=2, deadline=1000.01), clock=clock) as (engine, gated, answers):
        clock.now = 1001.01
        assert late(answers.wait(), "a", 2) == "the request's deadline passed 1.000 s ago"
        again = Answers(engine)
        again.submit(request("a", JSON))
        gated.go_on.set()
        assert valid(again.wait().text("a"))
        assert gated.compiled == 1


def test_who_waits_too_long_for_a_grammar_is_given_up_and_others_are_not() -> None:
    clock = Clock()
    config = SchedulerConfig(max_wait_seconds=500.0)
    with compiling(request("a", JSON, n=2), config, clock) as (engine, gated, answers):
        clock.now = 1400.0
        younger, other = Answers(engine), Answers(engine)
        younger.submit(request("b", JSON))
        other.submit(request("c", None))
        other.wait()  # the engine has turned since, and it was too early
        assert not answers.finish and answers.pending == 0
        clock.now = 1500.0
        other.submit(request("d", None))
        assert late(answers.wait(), "a", 2) == (
            "the request was not started within 500 s; remedy: try again later"
        )
        gated.go_on.set()
        assert valid(younger.wait().text("b"))
        timings = younger.finish["b", 0].timings
        assert timings is not None and timings.admitted == 1400.0  # not when its grammar was ready


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), 1e300])
def test_a_deadline_that_is_no_time_to_sleep_until_harms_nobody(deadline: float) -> None:
    with compiling(request("a", JSON, deadline=deadline)) as (engine, gated, answers):
        other = Answers(engine)
        other.submit(request("b", None))
        other.wait()
        gated.go_on.set()
        error = answers.wait().finish["a", 0].error
        assert error is None if deadline == 1e300 else (error or "").startswith("bad deadline")


def test_a_drained_engine_has_no_request_left_that_waited_too_long_for_a_grammar() -> None:
    clock = Clock()
    with compiling(request("a", JSON, deadline=1000.01), clock=clock) as (engine, gated, answers):
        engine.drain()
        assert not engine.wait_drained(0)
        clock.now = 1001.0
        assert engine.wait_drained(60)
        late(answers.wait(), "a", 1)
        gated.go_on.set()


def test_a_grammar_that_cannot_be_had_counts_as_a_rejection() -> None:
    with null_engine() as engine:
        answers = Answers(engine)
        answers.submit(request("a", JSON), request("b", None))
        answers.wait()
        assert answers.finish["a", 0].error_kind == "RequestError"
        assert engine.stats().rejections == 1  # b's finish brought a snapshot


def test_drain_waits_for_a_grammar() -> None:
    with compiling(request("a", JSON)) as (engine, gated, answers):
        engine.drain()
        assert not engine.wait_drained(0)
        gated.go_on.set()
        assert valid(answers.wait().text("a"))
        assert engine.wait_drained(60)


class Panic(BaseException):
    """As the library, which is Rust, raises where it has met a bug of its own."""


@pytest.mark.parametrize("failure", [ValueError("broken"), Panic("at line 7")])
def test_a_broken_library_fails_its_own_requests_only(failure: BaseException) -> None:
    gated = Gated()
    gated.fail = failure
    gated.go_on.set()
    with null_engine(grammars=gated) as engine:
        answers = Answers(engine)
        answers.submit(request("bound", spec("regex", "[0-9]+")), request("free", None))
        answers.wait()
        assert engine.alive()
    assert "cannot follow" in (answers.finish["bound", 0].error or "")
    assert answers.finish["free", 0].error is None


def test_matchers_copies_are_independent() -> None:
    one = factory().compile(LETTERS)
    two = one.copy()
    assert isinstance(two, LLGuidanceMatcher)
    assert not one.accept(ord("1"))
    assert two.accept(ord("a"))
