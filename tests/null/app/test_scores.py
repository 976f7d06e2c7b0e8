"""LLM.score, and what SamplingParams, get_metrics and sleep add to the offline API, on the null engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pegainfer.app.engine_slot import EngineSlot, weight_files
from pegainfer.app.metrics import Counter, Gauge, Histogram
from pegainfer.app.offline import LLM
from pegainfer.app.sampling_params import SamplingParams
from pegainfer.app.scores import LabelRequest, pairs_of
from pegainfer.app.structured import StructuredOutputsParams
from pegainfer.app.text import TextSide
from pegainfer.contract.errors import ConfigError, RequestError, UnsupportedError
from pegainfer.contract.event import FinishReason, TokenEvent, TokenLogprob
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.null.config import NullConfig
from pegainfer.null.runner import NullRunner
from tests.null.app.test_offline import GREEDY, over_null
from tests.null.engine.test_pooling import wanted
from tests.support.null_engine import null_info


def test_scores_by_the_angle_between_vectors() -> None:
    with over_null() as llm:
        outputs = llm.score("ab", ["ab", "xyz"], score_method="cosine")
    one, other = wanted(list(b"ab"), "mean"), wanted(list(b"xyz"), "mean")
    between = sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)
    assert [o.outputs.score for o in outputs] == pytest.approx([1.0, between], abs=1e-12)
    assert [o.prompt_token_ids for o in outputs] == [list(b"abab"), list(b"abxyz")]


def test_faulty_scores() -> None:
    with over_null() as llm:
        with pytest.raises(UnsupportedError, match="score_method to yes-no or cosine"):
            llm.score("a", "b")
        with pytest.raises(UnsupportedError, match="yes or no"):
            llm.score("a", "b", score_method="yes-no")
        with pytest.raises(RequestError, match="no instruction"):
            llm.score("a", "b", score_method="cosine", instruction="Find")
        with pytest.raises(RequestError, match="prompt 1: empty prompt"):
            llm.score("a", ["b", ""], score_method="cosine")


def test_pairs_of_texts() -> None:
    assert pairs_of("a", ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert pairs_of(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
    for first, second in ((["a", "b"], "c"), ("a", []), ([1], "b")):
        with pytest.raises(RequestError):
            pairs_of(first, second)  # type: ignore[arg-type]


def test_a_label_is_found_where_it_was_drawn_or_told() -> None:
    request = LabelRequest("r", [1, 2], (7, 8), 20)
    told = TokenLogprob(7, -0.5, 1, ((7, -0.5), (8, -2.0)))
    event = TokenEvent(request_id="r", tokens=(7,), logprobs=(told,), finish=FinishReason.LENGTH)
    assert request.take(event) == (True, False)
    assert request.found == {7: -0.5, 8: -2.0}
    assert request.to_engine().sampling.allowed_token_ids == (7, 8)


def test_prompts_are_cut_at_their_beginning() -> None:
    with over_null() as llm:
        for keep, ids in ((3, list(b"cde")), (-1, list(b"abcde")), (None, list(b"abcde"))):
            params = SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=keep)
            assert llm.generate("abcde", params)[0].prompt_token_ids == ids
        long = llm.generate("x" * 9000, SamplingParams(max_tokens=1, truncate_prompt_tokens=-1))[0]
        assert len(long.prompt_token_ids) == 4095
        for bad in (0, 4096):
            with pytest.raises(RequestError, match="truncate_prompt_tokens is out of range; expected -1, or"):
                llm.generate("a", SamplingParams(truncate_prompt_tokens=bad))


def test_ids_alone_are_wanted() -> None:
    with over_null() as llm:
        plain = llm.generate("abc", GREEDY)[0].outputs[0]
        bare = llm.generate("abc", SamplingParams(temperature=0, max_tokens=24, detokenize=False))[0].outputs[
            0
        ]
    assert plain.text and not bare.text
    assert bare.token_ids == plain.token_ids
    with pytest.raises(RequestError, match="stop strings are found in the text"):
        SamplingParams(detokenize=False, stop="x")


def test_structured_outputs_are_checked() -> None:
    with over_null() as llm:
        for bad, what in (
            (StructuredOutputsParams(), "exactly one of"),
            (StructuredOutputsParams(regex="a", choice=["b"]), "exactly one of"),
            (StructuredOutputsParams(regex="("), "structured_outputs.regex"),
            (StructuredOutputsParams(json='{"type": "nothing"}'), "structured_outputs.json"),
        ):
            with pytest.raises(RequestError, match=what):
                llm.generate("a", SamplingParams(structured_outputs=bad))
    with pytest.raises(RequestError, match="bad structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_metrics_of_the_engine() -> None:
    with over_null() as llm:
        llm.generate(["abc", "de"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        metrics = {(m.name, *m.labels.values()): m for m in llm.get_metrics()}
    prompts, texts = metrics[("pegainfer:prompt_tokens",)], metrics[("pegainfer:generation_tokens",)]
    assert isinstance(prompts, Counter) and prompts.value == 5
    assert isinstance(texts, Counter) and texts.value == 8
    ended = metrics[("pegainfer:request_success", "length")]
    assert isinstance(ended, Counter) and ended.value == 2
    running = metrics[("pegainfer:num_requests_running",)]
    assert isinstance(running, Gauge) and running.value == 0.0
    steps = metrics[("pegainfer:iteration_tokens_total",)]
    assert isinstance(steps, Histogram) and steps.sum == 5 + 6 and steps.buckets["+Inf"] == steps.count


def make() -> InProcessEngine:
    runner = NullRunner(NullConfig())
    return InProcessEngine(runner, null_info(runner))


def test_a_model_sleeps_and_answers_as_before() -> None:
    llm = LLM.over(make(), TextSide(byte_tokenizer(), None), SchedulerConfig())
    with pytest.raises(ConfigError, match="cannot sleep"):
        llm.sleep()
    llm.close()
    llm._slot = EngineSlot(make(), make)
    before = llm.generate("abc", GREEDY)[0].outputs[0].text
    for level in (1, 2):
        engine = llm._engine
        llm.sleep(level)
        assert llm._slot.asleep and not engine.alive()
        with pytest.raises(RequestError, match="asleep; remedy: call wake_up"):
            llm.generate("abc", GREEDY)
        llm.sleep(level)  # again does nothing
        with pytest.raises(ConfigError, match="bad tags"):
            llm.wake_up(tags=["weights"])
        llm.wake_up()
        assert llm.generate("abc", GREEDY)[0].outputs[0].text == before
    with pytest.raises(ConfigError, match="bad level"):
        llm.sleep(3)
    llm._slot.close()
    llm._slot.wake_up(None)
    assert not llm._slot.engine.alive()


def test_the_files_of_a_model(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).touch()
    assert [p.name for p in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    assert weight_files(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
    parts = weight_files(tmp_path / "m-00002-of-00002.gguf")
    assert [p.name for p in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
