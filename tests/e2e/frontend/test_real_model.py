"""The official client against a server of the default model on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from tests.support.default_model import default_model
from tests.support.server import Server, serving

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ALPHABET = "Here is the English alphabet: A B C"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(str(default_model()), "--served-model-name", "smol") as server:
        yield server


def test_a_chat_names_paris_and_streams_the_same(client: OpenAI) -> None:
    body = {"model": "smol", "messages": CAPITAL, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**body)  # type: ignore[call-overload]
    content = whole.choices[0].message.content
    assert "Paris" in content
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**body, stream=True))  # type: ignore[call-overload]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_string_across_tokens_is_never_shown(client: OpenAI) -> None:
    body = {"model": "smol", "prompt": ALPHABET, "temperature": 0, "max_tokens": 24}
    free = client.completions.create(**body)  # type: ignore[call-overload]
    text = free.choices[0].text
    assert "F G H" in text
    chunks = list(client.completions.create(**body, stop=["F G H"], stream=True))  # type: ignore[call-overload]
    shown = "".join(c.choices[0].text for c in chunks)
    assert shown == text[: text.index("F G H")]
    assert chunks[-1].choices[0].finish_reason == "stop"
    stopped = client.completions.create(**body, stop=["F G H"])  # type: ignore[call-overload]
    assert stopped.choices[0].text == shown
    assert stopped.usage.completion_tokens < free.usage.completion_tokens


def test_logprobs_are_of_the_tokens_shown(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol",
        messages=CAPITAL,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=5,
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(t.token for t in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        tops = [t.logprob for t in token.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert token.logprob == tops[0] <= 0  # greedy takes the best one
        assert token.bytes is not None
        assert bytes(token.bytes).decode() == token.token


def test_a_prompts_own_logprobs_by_echo(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smol", prompt="The capital of France is Paris.", echo=True, max_tokens=0, logprobs=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text == "The capital of France is Paris."
    values = dict(zip(logprobs.tokens, logprobs.token_logprobs, strict=True))
    assert values["The"] is None
    assert values[" Paris"] > -2  # it knows
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_repeated_prompt_is_cached_and_answered_alike(client: OpenAI) -> None:
    body = {
        "model": "smol",
        "messages": [{"role": "user", "content": "Count: " + " ".join(map(str, range(60)))}],
        "temperature": 0,
        "max_tokens": 12,
    }
    first, second = (client.chat.completions.create(**body) for _ in range(2))  # type: ignore[call-overload]
    assert first.usage.prompt_tokens_details.cached_tokens < 32  # no more than the template's beginning
    assert second.usage.prompt_tokens_details.cached_tokens > 100
    assert second.choices[0].message.content == first.choices[0].message.content


def test_together_and_alone_the_answers_are_the_same(client: OpenAI) -> None:
    prompts = ["The sky is", "Water boils at", "Once upon a time", "def add(a, b):"]

    def ask(prompt: str) -> str:
        answer = client.completions.create(model="smol", prompt=prompt, max_tokens=16)
        return answer.choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == alone
    batch = client.completions.create(model="smol", prompt=prompts, max_tokens=16)
    assert [choice.text for choice in batch.choices] == alone


def test_seeds_repeat(client: OpenAI) -> None:
    body = {"model": "smol", "messages": CAPITAL, "temperature": 1.0, "seed": 11, "max_tokens": 12, "n": 2}
    first, second = (client.chat.completions.create(**body) for _ in range(2))  # type: ignore[call-overload]
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 2
