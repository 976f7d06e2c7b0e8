"""Public bug reports of other servers, tried here: docs/lab/public-reports.md says which."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pegainfer.contract.request import GenerateRequest
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import TOKENIZER, ask, events, named_events
from tests.support.fake_engine import INFO, FakeEngine, says
from tests.support.scripted import ask_app, prompt_of, scripted

USER = {"role": "user", "content": "hi"}
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [USER]},
    MESSAGES: {"messages": [USER], "max_tokens": 60},
}
NO_USER = "{% if messages | length > 1 %}{{ raise_exception('No user query found.') }}{% endif %}"
STREAMED = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def says_all(text: str) -> FakeEngine:
    """An engine that ends its answer with EOS."""
    return FakeEngine(lambda request, index: [*text.encode(), *TOKENIZER.eos_token_ids])


@STREAMED
@pytest.mark.parametrize("said", ["ab", "a" * 60])
def test_every_chunk_has_a_finish_reason_and_the_last_one_names_it(path: str, said: str) -> None:
    """Null before the end, never absent or empty."""
    body = {**BODIES[path], "stream": True, "max_tokens": 60}
    chunks = events(ask(says_all(said), path, body).text)
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert chunks[-1] == "[DONE]" and len(reasons) > 1
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == ("length" if len(said) == 60 else "stop")


@STREAMED
@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("ABCDEFGHIJK", "DEFGHIJ", "ABC"),  # no part of it is shown before it is whole
        ("ABCDEFG", "DEFGHIJ", "ABCDEFG"),  # what was held back is shown in the end
        ("what?\nBob", "\n", "what?"),  # the end of the text before it is not lost
    ],
)
def test_stop_strings_over_several_tokens(path: str, said: str, stop: str, shown: str) -> None:
    body = {**BODIES[path], "stop": [stop], "max_tokens": 60}
    for stream in (False, True):
        answer = ask(says_all(said), path, {**body, "stream": stream}).text
        chunks = events(answer)[:-1] if stream else [json.loads(answer)]
        choices = [c["choices"][0] for c in chunks]
        texts = [c.get("text") or c.get("delta", c.get("message", {})).get("content") for c in choices]
        assert "".join(t or "" for t in texts) == shown


def test_offsets_of_an_echoed_stream_count_characters_over_all_chunks() -> None:
    body = {"prompt": "hé😊", "echo": True, "logprobs": 1, "stream": True, "max_tokens": 3}
    chunks = events(ask(FakeEngine(says("é!")), COMPLETIONS, body).text)[:-1]
    choices = [c["choices"][0] for c in chunks]
    assert "".join(c["text"] for c in choices) == "hé😊é!"
    offsets = [at for c in choices if c["logprobs"] for at in c["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 1, 2, 2, 2, 2, 3, 3, 4]


def test_logprobs_of_a_whole_prompt_and_the_next_token() -> None:
    """What loglikelihood tasks of evaluation programs read: one entry a token, the first without a value."""
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 1, "top_k": 1}
    logprobs = ask(FakeEngine(says("d")), COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d"]
    assert logprobs["token_logprobs"][0] is None and None not in logprobs["token_logprobs"][1:]
    assert logprobs["top_logprobs"][0] is None and all(logprobs["top_logprobs"][1:])


def test_logprobs_of_zero_alternatives_are_those_of_the_tokens() -> None:
    answer = ask(FakeEngine(says("d")), COMPLETIONS, {"prompt": "a", "logprobs": 0, "max_tokens": 1}).json()
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.25]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("half", ["\\ud83d", "x \\ude00 y", "\\udcf0"])
def test_half_a_surrogate_pair_is_the_clients_fault(path: str, half: str) -> None:
    body = json.dumps(BODIES[path]).replace('"a"', f'"{half}"').replace('"hi"', f'"{half}"')
    response = ask(FakeEngine(says("x")), path, body.encode())
    assert response.status_code == 400
    assert "half of a UTF-16 surrogate pair" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("ends_with", "read"), [("", "OK!"), ("\n", "OK!\n"), (" ", "OK! "), ("\t", "OK!\t")]
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_answer_goes_on_after_its_last_character(path: str, ends_with: str, read: str) -> None:
    """White space at its end is read as it is; on Anthropic's route an answer's beginning needs no flag."""
    engine = scripted("x")
    template = ChatTemplate(TOKENIZER.chat_template or "", TOKENIZER.config.special_tokens)
    app = create_app(engine, TOKENIZER, template, HttpConfig())
    body = {**BODIES[path], "messages": [USER, {"role": "assistant", "content": "OK!" + ends_with}]}
    if path == CHAT:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    assert ask_app(app, path, body).status_code == 200
    assert prompt_of(engine).endswith(f"assistant\n{read}")


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/responses"])
def test_what_a_template_says_of_a_refused_chat_reaches_the_client(path: str) -> None:
    app = create_app(scripted("x"), TOKENIZER, ChatTemplate(NO_USER, {}), HttpConfig())
    turns = [USER, {"role": "assistant", "content": "a"}, USER]
    response = ask_app(app, path, {"input" if path.endswith("responses") else "messages": turns})
    assert response.status_code == 400
    assert "No user query found." in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_chat_beyond_the_context_is_refused_and_not_cut(path: str) -> None:
    turns = [{"role": "user", "content": text} for text in ("first", "x" * INFO.max_model_len, "last")]
    engine = FakeEngine(says("x"))
    response = ask(engine, path, {**BODIES[path], "messages": turns})
    assert response.status_code == 400 and not engine.requests


def test_a_token_that_the_tokenizer_lacks_has_no_text() -> None:
    """Heads are wider than vocabularies: such an id may be drawn, and is none of the client's business."""

    def padded(request: GenerateRequest, index: int) -> list[int]:
        return [97, 300, 98]

    info = msgspec.structs.replace(INFO, vocab_size=320)
    for body in ({"logprobs": 1}, {"stream": True}, {"echo": True}):
        response = ask(FakeEngine(padded, info=info), COMPLETIONS, {"prompt": "x", "max_tokens": 3, **body})
        assert response.status_code == 200
        answer = response.text if "stream" in body else response.json()["choices"][0]["text"]
        shown = "".join(c["choices"][0]["text"] for c in events(answer)[:-1]) if "stream" in body else answer
        assert shown == ("xab" if "echo" in body else "ab")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": [[97], [258]]}, "input[1]"),
        (CHAT, {"messages": [USER], "logit_bias": {"258": -100, "5": 1}}, "logit_bias"),
        (CHAT, {"messages": [USER], "stop_token_ids": [258]}, "stop_token_ids[0]"),
        (COMPLETIONS, {"prompt": [97, 2**63]}, "prompt"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(path: str, body: dict[str, Any], param: str) -> None:
    engine = FakeEngine(says("x"))
    response = ask(engine, path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)
    assert not engine.requests


def test_special_tokens_are_plain_text_where_a_client_wants_them_so() -> None:
    def ids(**more: Any) -> Any:
        body = {"prompt": "<|im_end|>", "add_special_tokens": False, **more}
        return ask(FakeEngine(), "/tokenize", body).json()["tokens"]

    assert ids() == ids(parse_special=True) == list(TOKENIZER.eos_token_ids)
    assert ids(parse_special=False) == list(b"<|im_end|>")


def test_a_messages_stream_ends_with_its_reason() -> None:
    body = {**BODIES[MESSAGES], "stream": True}
    named = named_events(ask(says_all("ab"), MESSAGES, body).text)
    assert named[-2][1]["delta"]["stop_reason"] == "end_turn" and named[-1][0] == "message_stop"
