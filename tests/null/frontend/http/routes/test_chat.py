from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.request import SamplingParams, unpack_tokens
from tests.support.asgi import TOKENIZER, ask
from tests.support.fake_engine import FakeEngine, says

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def chat(text: str = "hello", /, **body: Any) -> tuple[dict[str, Any], FakeEngine]:
    engine = FakeEngine(says(text))
    response = ask(engine, PATH, {"messages": [USER], **body})
    assert response.status_code == 200, response.text
    return response.json(), engine


def refuse(**body: Any) -> dict[str, Any]:
    engine = FakeEngine()
    response = ask(engine, PATH, {"messages": [USER], **body})
    assert response.status_code == 400, response.text
    assert not engine.requests
    error: dict[str, Any] = response.json()["error"]
    return error


def prompt_of(engine: FakeEngine) -> str:
    return TOKENIZER.decode(unpack_tokens(engine.requests[0].prompt), skip_special_tokens=False)


def test_an_answer_has_openais_shape() -> None:
    answer, engine = chat("hello", max_tokens=5)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert answer["usage"]["completion_tokens"] == 5
    assert prompt_of(engine) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_openais_defaults_and_no_bound_but_the_context() -> None:
    answer, engine = chat()
    assert engine.requests[0].sampling == SamplingParams()
    assert engine.requests[0].sampling.max_tokens is None
    usage = answer["usage"]
    assert usage["total_tokens"] == engine.info.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_bound(field: str) -> None:
    assert chat(**{field: 3})[0]["usage"]["completion_tokens"] == 3
    assert refuse(**{field: 0})["param"] == field
    assert chat(**{field: -1})[0]["choices"][0]["finish_reason"] == "length"  # at the context's end
    assert refuse(**{field: -2})["param"] == field
    assert refuse(**{field: 2**31})["param"] == field


def test_two_bounds_must_agree() -> None:
    assert chat(max_tokens=3, max_completion_tokens=3)[0]["usage"]["completion_tokens"] == 3
    assert refuse(max_tokens=3, max_completion_tokens=4)["param"] == "max_tokens"


def test_null_means_absent() -> None:
    import msgspec

    from pegainfer.frontend.http.request.conversation import ChatRequest

    names = [f.name for f in msgspec.structs.fields(ChatRequest) if f.name != "messages"]
    _, engine = chat(**dict.fromkeys(names))
    assert engine.requests[0].sampling == SamplingParams()


def test_a_whole_conversation_reaches_the_template() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        # As the OpenAI client dumps an answer.
        {
            "role": "assistant",
            "content": "c",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        },
        {"role": "user", "content": "", "name": "me"},
    ]
    _, engine = chat(messages=messages, max_tokens=1)
    assert prompt_of(engine) == (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_generation_prompt_can_be_left_out() -> None:
    _, engine = chat(add_generation_prompt=False, max_tokens=1)
    assert prompt_of(engine) == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_final_message_can_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is"}]
    _, engine = chat(messages=messages, continue_final_message=True, max_tokens=1)
    assert prompt_of(engine).endswith("<|im_start|>assistant\nThe answer is")
    assert refuse(continue_final_message=True)["param"] == "continue_final_message"
    error = refuse(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


def test_template_variables_are_allowed_by_name() -> None:
    chat(chat_template_kwargs={"enable_thinking": False}, max_tokens=1)
    for name in ("messages", "bos_token", "x", "__class__"):
        assert refuse(chat_template_kwargs={name: "a"})["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "king", "content": "a"}], "messages[0].role"),
        ([{"role": 1, "content": "a"}], "messages[0].role"),
        ([USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "a", "colour": "red"}], "messages[0].colour"),
        ([USER, {"role": "function", "content": "1", "name": "x"}], "messages[1].role"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "a", "reasoning_content": "b"}], "messages[0].reasoning_content"),
        ([{"role": "user", "content": "a", "tool_call_id": "b"}], "messages[0].tool_call_id"),
        (["hi"], "messages[0]"),
    ],
)  # fmt: skip
def test_bad_messages_are_named(messages: Any, param: str) -> None:
    assert refuse(messages=messages)["param"] == param


UNSERVED = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["audio"],
    "audio": {"voice": "x"},
    "web_search_options": {},
    "kv_transfer_params": {"do_remote_decode": True},
    "echo": True,
    "best_of": 2,
    "include_reasoning": False,
}
REMEDIES = {"functions": "; use tools", "function_call": "; use tool_choice"}


@pytest.mark.parametrize("field", UNSERVED)
def test_what_is_not_served_is_refused_by_name(field: str) -> None:
    error = refuse(**{field: UNSERVED[field]})
    assert error["param"] == field
    assert error["message"] == f"{field}: not supported yet by this server" + REMEDIES.get(field, "")


TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ raise }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/apply_template"])
def test_a_template_of_the_requests_own_needs_a_flag(path: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": TEMPLATE}
    answer = ask(FakeEngine(), path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("chat_template: expected none")
    engine = FakeEngine()
    answer = ask(engine, path, body, request_chat_template=True)
    assert answer.status_code == 200, answer.text
    if path == "/v1/chat/completions":
        assert TOKENIZER.decode(unpack_tokens(engine.requests[0].prompt), skip_special_tokens=False) == "<hi>"
    elif path == "/tokenize":
        assert answer.json()["tokens"] == list(b"<hi>")
    else:
        assert answer.json() == {"prompt": "<hi>"}


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ 1/0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        ENDLESS,
    ],
)
def test_a_hostile_template_is_its_requests_fault(template: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": template}
    config = {"request_chat_template": True, "template_seconds": 1.0}
    answer = ask(FakeEngine(), "/apply_template", body, **config)
    assert answer.status_code == 400, answer.text
    assert "chat template" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("parallel_tool_calls", True),
        ("modalities", ["text"]),
        ("store", False),
        ("service_tier", "auto"),
        ("verbosity", "medium"),
        ("reasoning_effort", "none"),
        ("safety_identifier", "a"),
        ("prompt_cache_key", "a"),
        ("spaces_between_special_tokens", True),
    ],
)
def test_a_value_that_asks_for_nothing_is_no_fault(field: str, value: Any) -> None:
    chat(**{field: value}, max_tokens=1)


def test_no_effort_changes_the_answer_of_a_model_that_does_not_think() -> None:
    prompts = [chat(reasoning_effort=effort)[1].requests[0].prompt for effort in (None, "low", "max")]
    assert prompts == prompts[:1] * 3
    assert refuse(reasoning_effort="loud")["param"] == "reasoning_effort"


def test_logprobs_in_openais_shape() -> None:
    answer, engine = chat("aé", max_tokens=3, logprobs=True, top_logprobs=2)
    assert engine.requests[0].sampling.logprobs == 2
    content = answer["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "b", "logprob": -0.5, "bytes": [98]},
        ],
    }
    assert content[1]["bytes"] == [0xC3]


def test_logprobs_without_alternatives_and_alternatives_without_logprobs() -> None:
    answer, engine = chat("ab", max_tokens=2, logprobs=True)
    assert engine.requests[0].sampling.logprobs == 0
    assert [c["top_logprobs"] for c in answer["choices"][0]["logprobs"]["content"]] == [[], []]
    assert refuse(top_logprobs=2)["param"] == "top_logprobs"
    assert refuse(top_logprobs=2, logprobs=False)["param"] == "top_logprobs"
    assert refuse(logprobs=True, top_logprobs=21)["param"] == "top_logprobs"
    assert refuse(logprobs=2)["param"] == "logprobs"


def test_n_choices() -> None:
    engine = FakeEngine(lambda r, i: [97 + i])
    answer = ask(engine, PATH, {"messages": [USER], "n": 3, "max_tokens": 1}).json()
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]


def test_prompt_token_ids_and_logprobs_stand_once() -> None:
    answer, engine = chat("a", max_tokens=1, n=2, return_token_ids=True, prompt_logprobs=0)
    ids = unpack_tokens(engine.requests[0].prompt)
    assert answer["prompt_token_ids"] == ids
    assert len(answer["prompt_logprobs"]) == len(ids)
    assert [c["token_ids"] for c in answer["choices"]] == [[97], [97]]


def test_an_over_long_chat_tells_both_lengths() -> None:
    error = refuse(messages=[{"role": "user", "content": "x" * 300}])
    assert error["param"] == "messages"
    assert "expected ≤ 255 tokens" in error["message"]
    assert "got 319" in error["message"]


def test_a_model_without_a_template_says_so() -> None:
    engine = FakeEngine()
    response = ask(engine, PATH, {"messages": [USER]}, template=False)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_a_long_conversation_is_rendered_off_the_loop() -> None:
    messages = [USER, {"role": "assistant", "content": "ok"}] * 100
    engine = FakeEngine()
    response = ask(engine, PATH, {"messages": messages, "truncate_prompt_tokens": 100, "max_tokens": 1})
    assert response.status_code == 200
    assert len(unpack_tokens(engine.requests[0].prompt)) == 100
