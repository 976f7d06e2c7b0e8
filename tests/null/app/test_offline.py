"""LLM on the null engine: forms of prompts, order, stops, n, flow control, errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app import engine_slot, llm_options
from pegainfer.app.offline import LLM
from pegainfer.app.outputs import Logprob
from pegainfer.app.resolve import ModelRef
from pegainfer.app.sampling_params import SamplingParams
from pegainfer.app.text import TextSide
from pegainfer.contract.errors import ConfigError, EngineDeadError, InvariantError, PegaError, RequestError
from pegainfer.contract.request import SamplingParams as EngineParams
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.byte_tokenizer import CHATML, byte_tokenizer
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.null.config import NullConfig
from pegainfer.null.model import NullModel
from pegainfer.null.runner import NullRunner
from tests.support.null_engine import null_info

GREEDY = SamplingParams(temperature=0, max_tokens=24)
EOS = 257
MODEL = NullModel()


def over_null(
    scheduler: SchedulerConfig | None = None, generation: Mapping[str, Any] | None = None, **null: Any
) -> LLM:
    runner = NullRunner(NullConfig(max_slots=4, **null))
    scheduler = scheduler or SchedulerConfig()
    tokenizer = byte_tokenizer()
    text = TextSide(tokenizer, ChatTemplate(CHATML, tokenizer.config.special_tokens), generation or {})
    return LLM.over(InProcessEngine(runner, null_info(runner), scheduler), text, scheduler)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with over_null() as found:
        yield found


def wanted(prompt: str | Sequence[int], max_tokens: int = 24) -> list[int]:
    """What the null model answers greedily, its end included."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    params = EngineParams(temperature=0, max_tokens=max_tokens)
    return MODEL.continuation(ids, params, 0, eos_token_ids=(EOS,), max_model_len=4096)


def shown(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode()


def test_many_prompts_keep_their_order(llm: LLM) -> None:
    """More than slots and window, of many lengths; each is continued as if alone."""
    prompts = [f"{i} " * (1 + i % 40) for i in range(150)]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == prompts
    for output in outputs:
        assert output.prompt_token_ids == list(output.prompt.encode())
        (c,) = output.outputs
        assert c.token_ids == wanted(output.prompt)
        assert c.text == shown(c.token_ids)
        assert c.finish_reason == ("stop" if c.token_ids[-1] == EOS else "length")
        assert (c.index, c.stop_reason, c.logprobs, c.cumulative_logprob) == (0, None, None, None)
        assert output.finished
        assert output.metrics is not None
    assert len({o.request_id for o in outputs}) == 150


@pytest.mark.parametrize(
    "prompt", ["abc", [97, 98, 99], {"prompt": "abc"}, {"prompt_token_ids": [97, 98, 99]}, (97, 98, 99)]
)
def test_forms_of_a_prompt(llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, GREEDY)
    assert output.prompt_token_ids == [97, 98, 99]
    assert output.prompt == ("abc" if prompt in ("abc", {"prompt": "abc"}) else None)
    assert output.outputs[0].token_ids == wanted("abc")
    assert [o.outputs[0].token_ids for o in llm.generate([prompt, "xy"], GREEDY)] == [
        wanted("abc"),
        wanted("xy"),
    ]


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_parameters_one_a_prompt_and_defaults(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 3]
    (output,) = llm.generate("abc")
    assert len(output.outputs[0].token_ids) <= 16  # as in vLLM


def test_chats_become_prompts(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    (one,) = llm.chat(messages, GREEDY)
    assert one.prompt == text
    assert one.prompt_token_ids[:2] == [256, ord("u")]
    two = llm.chat([messages, [*messages, {"role": "assistant", "content": "ho"}]], GREEDY)
    assert [o.prompt for o in two] == [
        text,
        text.replace("hi<|im_end|>\n", "hi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"),
    ]
    assert two[0].outputs[0].text == one.outputs[0].text
    assert llm.chat([], GREEDY) == []  # no conversation, as no prompt


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "bad messages; expected a conversation"),
        (USER, "bad messages; expected a conversation"),
        ([[]], "prompt 0: messages: expected at least one message, got none"),
        ([[USER], []], "prompt 1: messages: expected at least one message, got none"),
        ([USER, [USER]], "bad messages; expected a conversation"),
        ([[USER], "hi"], "prompt 1: bad messages"),
        ([{"content": "hi"}], "prompt 0: messages[0].role: required"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role: expected one of system"),
        ([{"role": "user"}], "messages[0].content: expected a string or a list of text parts"),
        ([{**USER, "mood": "good"}], "messages[0].mood: unknown field"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
    ],
)
def test_faulty_chats_are_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.chat(messages, GREEDY)
    assert message in str(error.value)


def test_parts_of_text_are_read_as_the_server_reads_them(llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (output,) = llm.chat([{"role": "developer", "content": parts}], GREEDY)
    assert output.prompt == "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>assistant\n"


def test_tools_are_told_of_where_the_template_knows_none(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    history = [
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    (output,) = llm.chat(history, GREEDY, tools=[tool])
    assert output.prompt is not None
    assert output.prompt.startswith("<|im_start|>system\nYou can call these functions")
    assert '{"name": "weather", "parameters": {"type": "object"}}' in output.prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>' in output.prompt
    assert "<tool_response>\nrain\n</tool_response>" in output.prompt
    with pytest.raises(RequestError, match=r"tools\[0\]\.function"):
        llm.chat([USER], GREEDY, tools=[{"type": "function"}])


def says(text: str) -> NullModel:
    """A model that answers every prompt with this text, byte by byte, and then EOS."""
    ids = [*text.encode(), EOS]
    return NullModel(
        next_token=lambda tokens, num_prompt, seed: ids[min(len(tokens) - num_prompt, len(ids) - 1)]
    )


@pytest.mark.parametrize(
    ("params", "text", "reason", "stop", "count"),
    [
        ({}, "one two\nthree", "stop", None, 14),
        ({"max_tokens": 5}, "one t", "length", None, 5),
        ({"stop": "tw"}, "one ", "stop", "tw", 6),
        ({"stop": ["zz", "\n"]}, "one two", "stop", "\n", 8),
        ({"stop": "tw", "include_stop_str_in_output": True}, "one tw", "stop", "tw", 6),
        ({"stop": "wx"}, "one two\nthree", "stop", None, 14),  # what was held back is given in the end
        ({"stop": "e", "min_tokens": 4}, "one two\nthr", "stop", "e", 12),
        ({"stop_token_ids": [ord("w")]}, "one t", "stop", ord("w"), 6),
        ({"stop_token_ids": [ord("w")], "include_stop_str_in_output": True}, "one tw", "stop", ord("w"), 6),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "one two\nthree<|im_end|>",
            "stop",
            None,
            14,
        ),
    ],
)
def test_ends(params: dict[str, Any], text: str, reason: str, stop: Any, count: int) -> None:
    with over_null(model=says("one two\nthree")) as llm:
        (output,) = llm.generate("x", SamplingParams(temperature=0, **{"max_tokens": 64, **params}))
    (c,) = output.outputs
    assert (c.text, c.finish_reason, c.stop_reason, len(c.token_ids)) == (text, reason, stop, count)


def test_sampling_parameters_may_be_assigned_until_they_are_used(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0.0, 3
    (output,) = llm.generate("abc", params)
    assert output.outputs[0].token_ids == wanted("abc", 3)
    params.max_tokens = "many"  # type: ignore[assignment]
    with pytest.raises(RequestError, match=r"prompt 0: bad max_tokens; expected int .* got 'many'"):
        llm.generate("abc", params)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(("shown", "text"), [(False, "hi"), (True, "hi<|im_end|>")])
def test_a_stop_string_that_is_a_special_token_stops_by_its_id(
    ignore_eos: bool, shown: bool, text: str
) -> None:
    """Its text is left out of answers, so that it would never be found there."""
    params = SamplingParams(
        temperature=0,
        max_tokens=64,
        stop=["zz", "<|im_end|>"],
        ignore_eos=ignore_eos,
        include_stop_str_in_output=shown,
        skip_special_tokens=False,
    )
    with over_null(model=says("hi")) as llm:
        (output,) = llm.generate("x", params)
    (c,) = output.outputs
    assert (c.text, c.token_ids) == (text, [*b"hi", EOS])
    assert (c.finish_reason, c.stop_reason) == ("stop", "<|im_end|>")


def test_a_stopped_request_leaves_nothing_behind() -> None:
    with over_null(model=says("a" * 3000)) as llm:
        outputs = llm.generate(["x"] * 6, SamplingParams(temperature=0, max_tokens=3000, stop="aa"))
        assert [o.outputs[0].text for o in outputs] == [""] * 6
        # The next call works on an engine whose cancelled rows have gone.
        (output,) = llm.generate("y", SamplingParams(temperature=0, max_tokens=4))
        assert output.outputs[0].text == "aaaa"


def test_several_continuations(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    (again,) = llm.generate("abc", SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True))
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


def test_one_continuation_stops_while_others_go_on() -> None:
    texts = {0: "stop here", 1: "and so on"}
    seeds: dict[int, int] = {}

    def next_token(tokens: Sequence[int], num_prompt: int, seed: int) -> int:
        text = texts[seeds.setdefault(seed, len(seeds))].encode()
        return [*text, EOS][min(len(tokens) - num_prompt, len(text))]

    with over_null(model=NullModel(next_token=next_token)) as llm:
        (output,) = llm.generate("x", SamplingParams(n=2, max_tokens=64, stop="op"))
    assert sorted((c.text, c.stop_reason) for c in output.outputs) == [("and so on", None), ("st", "op")]


def test_logprobs(llm: LLM) -> None:
    (output,) = llm.generate(
        "abc", SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    )
    (c,) = output.outputs
    assert c.logprobs is not None
    assert [next(iter(entry)) for entry in c.logprobs] == c.token_ids
    assert c.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(c.logprobs, c.token_ids, strict=True))
    )
    assert all(len(entry) == 2 for entry in c.logprobs)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(e)) for e in output.prompt_logprobs[1:] if e] == [98, 99]
    assert isinstance(c.logprobs[0][c.token_ids[0]], Logprob)
    assert c.logprobs[0][c.token_ids[0]].decoded_token == chr(c.token_ids[0])


def test_prefix_hits_are_counted(llm: LLM) -> None:
    prompt = "a long enough prompt that fills two blocks"
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_small_queue_is_never_overrun() -> None:
    """The engine would refuse what waits beyond these bounds."""
    scheduler = SchedulerConfig(max_waiting_requests=2, max_waiting_tokens=40, max_slots=1)
    with over_null(scheduler) as llm:
        prompts = ["x" * n for n in (30, 5, 39, 10, 10, 10, 40, 1, 25)]
        outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [wanted(p) for p in prompts]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["ab", ""], None, "prompt 1: empty prompt"),
        (["ab", 3], None, "prompt 1: bad prompt"),
        (["ab", {"text": "x"}], None, "prompt 1: bad prompt"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], None, "prompt 0: bad prompt"),
        ([[1, 2, 300]], None, "prompt 0: token id out of the vocabulary"),
        (5, None, "bad prompts"),
        (["a", "b"], [SamplingParams()], "sampling_params and prompts differ in number; expected 2; got 1"),
        (["a"], ["greedy"], "bad sampling_params"),
        (["a", "b"], SamplingParams(temperature=-1), "prompt 0: temperature is out of range"),
        (["a"], SamplingParams(top_k=-2), "prompt 0: top_k is out of range"),
        (["a"], SamplingParams(n=0), "prompt 0: n is out of range"),
        (["a"], SamplingParams(bad_words=[" "]), "prompt 0: bad word without letters"),
        (["a"], SamplingParams(stop=""), "prompt 0: a stop string has a wrong length"),
        (["a" * 5000], None, "prompt 0: the prompt leaves no room for an answer"),
    ],
)
def test_bad_arguments_are_named(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, params)
    assert message in str(error.value)
    # The engine goes on, and nothing of the failed call is left in the way.
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == wanted("abc")


@pytest.mark.parametrize(
    ("prompt", "most", "count"),
    [(127, 1, 1), (127, 9, 1), (127, None, 1), (100, 28, 28), (100, 29, 28), (100, None, 28), (128, 0, 0)],
)
def test_the_context_filled_exactly(prompt: int, most: int | None, count: int) -> None:
    """Prompt and answer together take the whole context; one token more of the prompt is refused."""
    model = NullModel(next_token=lambda tokens, num_prompt, seed: 97)
    with over_null(model=model, max_model_len=128) as llm:
        (output,) = llm.generate([[98] * prompt], SamplingParams(max_tokens=most))
        (c,) = output.outputs
        assert (c.token_ids, c.finish_reason) == ([97] * count, "length")
        longest = 128 if most == 0 else 127
        with pytest.raises(RequestError, match=rf"no room for an answer; expected at most {longest} tokens"):
            llm.generate([[98] * (longest + 1)], SamplingParams(max_tokens=most))


@pytest.mark.parametrize(
    ("good", "bad", "match"),
    [
        ({"stop": list("abcdefghijklmnop")}, {"stop": list("abcdefghijklmnopq")}, "≤ 16; got 17"),
        ({"stop": "x" * 1024}, {"stop": "x" * 1025}, "1 to 1024 bytes; got 1025"),
        ({"n": 128}, {"n": 129}, r"n is out of range; expected 1\.\.128; got 129"),
        ({"logprobs": 20}, {"logprobs": 21}, r"expected 0\.\.20; got 21"),
        ({"prompt_logprobs": 20}, {"prompt_logprobs": 21}, r"expected 0\.\.20; got 21"),
        ({"logit_bias": {257: 1.0}}, {"logit_bias": {258: 1.0}}, r"expected 0\.\.257; got 258"),
        ({"allowed_token_ids": [257]}, {"allowed_token_ids": [258]}, r"expected 0\.\.257; got 258"),
        ({"stop_token_ids": [257]}, {"stop_token_ids": [258]}, r"expected 0\.\.257; got 258"),
        ({"max_tokens": 16, "min_tokens": 16}, {"max_tokens": 16, "min_tokens": 17}, "≤ 16; got 17"),
    ],
)
def test_values_of_exactly_their_limit(
    llm: LLM, good: dict[str, Any], bad: dict[str, Any], match: str
) -> None:
    (output,) = llm.generate("abc", SamplingParams(**good))
    assert len(output.outputs) == good.get("n", 1)
    with pytest.raises(RequestError, match=match):
        llm.generate("abc", SamplingParams(**bad))


def test_a_sequence_that_fails_in_a_step_is_raised() -> None:
    with over_null(
        faults=lambda plan: {0: "the model's logits are not finite"} if plan.step == 3 else None
    ) as llm:
        with pytest.raises(PegaError, match="not finite"):
            llm.generate(["abc", "defg"], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == wanted("abc")


def test_options_are_known_or_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^pipeline_parallel_size 2 is not served here; remedy: one process computes on one GPU",
    ):
        LLM("no-such-model", pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="only the null device has data-parallel ranks so far"):
        LLM("no-such-model", data_parallel_size=2)
    with pytest.raises(ConfigError, match="bad max_model_len"):
        LLM("no-such-model", max_model_len=0)
    with pytest.raises(ConfigError, match="bad max_model_len; expected a whole number from 2; got 1"):
        LLM("no-such-model", max_model_len=1)  # there would be no room for an answer
    with pytest.raises(ConfigError, match="no such model"):
        LLM("no-such-model", max_num_seqs=3, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="no such model"):
        LLM(Path("/no/such/model.gguf"))
    with pytest.raises(ConfigError, match="bad model; expected a name or a path; got None"):
        LLM(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "target"), [({}, 0.0), ({"target_itl_ms": 40.0}, 40.0)])
def test_prompts_take_what_a_step_has_unless_a_latency_is_asked_for(
    options: dict[str, Any], target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def build(path: Any, name: str, config: Any, scheduler: SchedulerConfig, **others: Any) -> Any:
        seen.append(scheduler.target_itl_ms)
        raise ConfigError("not in this test")

    monkeypatch.setattr(llm_options, "resolve", lambda model, **place: ModelRef("gguf", Path("m.gguf"), "m"))
    monkeypatch.setattr(llm_options, "load_text", lambda ref, options: TextSide(byte_tokenizer(), None))
    monkeypatch.setattr(engine_slot, "build_engine", build)
    with pytest.raises(ConfigError, match="not in this test"):
        LLM("m", **options)
    assert seen == [target]


def test_a_models_own_sampling_holds_where_none_is_given() -> None:
    generation = {"temperature": 0.0, "max_new_tokens": 3, "unknown": 1}
    with over_null(generation=generation) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        (output,) = llm.generate("abc")
        assert output.outputs[0].token_ids == wanted("abc")[:3]
    with over_null() as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "2"),
        ("n", True),
        ("temperature", "hot"),
        ("stop", [1]),
        ("logit_bias", {"a": 1.0}),
        ("seed", 1.5),
        ("ignore_eos", 1),
        ("stop_token_ids", "abc"),
        ("logprobs", True),
        ("bad_words", "word"),
    ],
)
def test_sampling_params_check_types(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"bad {field}") as error:
        SamplingParams(**{field: value})
    assert error.value.param == field


def test_sampling_params_in_the_engines_form() -> None:
    tokenizer = byte_tokenizer()
    params = SamplingParams(
        top_k=-1, logit_bias={3: 1.0}, bad_words=["no"], stop_token_ids=[5], allowed_token_ids=[1, 2]
    )
    engine = params.to_engine(tokenizer.encode)
    assert engine.top_k == 0
    assert engine.logit_bias == ((3, 1.0),)
    assert engine.bad_words == (tuple(b"no"), tuple(b" no"))
    assert (engine.stop_token_ids, engine.allowed_token_ids, engine.max_tokens) == ((5,), (1, 2), 16)


def test_close_is_idempotent() -> None:
    llm = over_null()
    llm.close()
    llm.close()
    with pytest.raises(PegaError):
        llm.generate("a")


def test_a_dead_engine_is_raised_not_waited_for() -> None:
    llm = over_null(faults=lambda plan: InvariantError("a broken plan") if plan.step == 4 else None)
    for _ in range(2):  # while it dies, and afterwards
        with pytest.raises(EngineDeadError):
            llm.generate(["abc", "defg"], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    llm.close()
