"""Sampled answers under JSON schemas: are they all valid, and what does a mask cost a step?

    python bench/structured_output.py [--count 500] [--batch 16] [--only NAME] [--cost]

Draws COUNT answers of the default model at temperature 1, over the schemas of tests/support/schemas.py in
turn, and checks each with jsonschema. --cost measures decoding with and without a grammar of a JSON string
that never ends, so that both write texts of the same length.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import queue
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jsonschema

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.app.grammars import LLGuidanceGrammars
from pegainfer.app.resolve import resolve
from pegainfer.app.text import TextSide, load_text
from pegainfer.contract.event import TokenEvent
from pegainfer.contract.request import GenerateRequest, GrammarSpec, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.grammar.compiler import GrammarJob, compile_grammar
from pegainfer.frontend.grammar.vocabulary import ll_tokenizer, vocabulary_of
from tests.support.schemas import SCHEMAS, Schema

MAX_TOKENS = 1500
COST_TOKENS = 64
COST_RUNS = 31


class Runner:
    """The default model with grammars, in this process."""

    def __init__(self) -> None:
        ref = resolve("smollm2-135m-instruct")
        self.text: TextSide = load_text(ref)
        vocabulary = vocabulary_of(self.text.tokenizer)
        self.ll = ll_tokenizer(vocabulary)
        built = build_engine(ref.path, ref.name, EngineConfig(max_model_len=4096), SchedulerConfig())
        grammars = LLGuidanceGrammars(lambda: vocabulary, built.info.vocab_size)
        self.engine = InProcessEngine(built.runner, built.info, grammars=grammars)

    def request(self, name: str, spec: GrammarSpec | None, about: str, **sampling: object) -> GenerateRequest:
        template = self.text.template
        assert template is not None
        prompt = template.render([{"role": "user", "content": about}], now=datetime.datetime.now())
        tokenizer = self.text.tokenizer
        return GenerateRequest(
            id=name,
            prompt=pack_tokens(tokenizer.encode(prompt, add_special_tokens=False)),
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
            grammar=spec,
            eos_token_ids=tokenizer.eos_token_ids,
        )

    def run(self, requests: list[GenerateRequest], batch: int) -> dict[str, tuple[list[int], str]]:
        """Token ids and finish of each request; `batch` of them run together."""
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        waiting = iter(requests)
        tokens: dict[str, list[int]] = {r.id: [] for r in requests}
        done: dict[str, tuple[list[int], str]] = {}
        for request in itertools.islice(waiting, batch):
            self.engine.submit(request, events.put)
        while len(done) < len(requests):
            event = events.get()
            tokens[event.request_id] += event.tokens
            if event.finish is None:
                continue
            found = tokens[event.request_id]
            if event.stop_token is not None:
                found = found[:-1]
            done[event.request_id] = (found, event.error or event.finish.value)
            following = next(waiting, None)
            if following is not None:
                self.engine.submit(following, events.put)
        return done


def spec_of(runner: Runner, schema: Schema) -> GrammarSpec:
    job = GrammarJob("json_schema", json.dumps(schema))
    return GrammarSpec("json_schema", compile_grammar(job, runner.ll))


def check(runner: Runner, count: int, batch: int, only: str | None) -> Counter[str]:
    """Prints what is not valid; returns how many, by the answers' finish reasons."""
    specs = {name: spec_of(runner, schema) for name, schema in SCHEMAS.items() if only in (None, name)}
    names = list(itertools.islice(itertools.cycle(specs), count))
    requests = [
        runner.request(
            f"{i}:{name}", specs[name], f"Give me an example of: {name}. Answer in JSON.",
            temperature=1.0, seed=i, max_tokens=MAX_TOKENS,
        )
        for i, name in enumerate(names)
    ]  # fmt: skip
    began = time.perf_counter()
    answers = runner.run(requests, batch)
    seconds = time.perf_counter() - began
    faults: Counter[str] = Counter()
    for id, (tokens, finish) in answers.items():
        name = id.split(":", 1)[1]
        text = runner.text.tokenizer.decode(tokens)
        try:
            jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())
        except (ValueError, jsonschema.ValidationError) as error:
            faults[finish] += 1
            print(f"{id}: {finish}: {str(error).splitlines()[0]}: {text[:100]!r} … {text[-60:]!r}")
    total = sum(len(t) for t, _ in answers.values())
    print(f"{count - faults.total()} of {count} valid, {total} tokens in {seconds:.1f} s, batch {batch}")
    return faults


def cost(runner: Runner, batch: int) -> None:
    """Prints the time a step with and without a grammar: medians of alternating runs and of their ratios."""
    job = GrammarJob("regex", r'"([^"\\\n]|\\["n])*')
    spec = GrammarSpec("regex", compile_grammar(job, runner.ll))
    times: dict[bool, list[float]] = {False: [], True: []}
    for run in range(COST_RUNS + 1):
        for with_grammar in (False, True):
            requests = [
                runner.request(
                    f"{run}{with_grammar}{i}", spec if with_grammar else None, "Tell me a story.",
                    temperature=1.0, seed=i, max_tokens=COST_TOKENS, min_tokens=COST_TOKENS, ignore_eos=True,
                )
                for i in range(batch)
            ]  # fmt: skip
            before = runner.engine.stats()
            began = time.perf_counter()
            answers = runner.run(requests, batch)
            seconds = time.perf_counter() - began
            steps = runner.engine.stats().steps - before.steps
            if run:  # the first warms up
                times[with_grammar].append(seconds / steps)
            mean = statistics.mean(len(t) for t, _ in answers.values())
    plain, masked = (statistics.median(times[k]) * 1e3 for k in (False, True))
    stats = runner.engine.stats()
    more = statistics.median(b / a for a, b in zip(times[False], times[True], strict=True)) - 1
    print(f"batch {batch}: {plain:.3f} ms a step without, {masked:.3f} ms with a grammar: {more:+.1%}")
    print(f"  (answers under the grammar had {mean:.0f} tokens; host seconds: {stats.host_seconds})")


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--only", choices=list(SCHEMAS))
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    runner = Runner()
    try:
        if options.cost:
            cost(runner, options.batch)
            return 0
        return 1 if check(runner, options.count, options.batch, options.only) else 0
    finally:
        runner.engine.close()


if __name__ == "__main__":
    sys.exit(main())
