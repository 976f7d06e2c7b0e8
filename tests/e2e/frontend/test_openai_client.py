"""The official client against a real server process on the null device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.server import Server, serving

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--device", "null", "--served-model-name", "null-model") as process:
        yield process


def test_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(
        model="null-model", prompt="abc", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert len(answer.choices[0].text) == 12
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
    again = client.completions.create(
        model="null-model", prompt="abc", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert again.choices == answer.choices


def test_a_streamed_completion_is_the_whole_one(client: OpenAI) -> None:
    body = {
        "model": "null-model",
        "prompt": "stream me",
        "max_tokens": 30,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**body)  # type: ignore[call-overload]
    chunks = list(
        client.completions.create(**body, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"


def test_several_prompts_and_choices(client: OpenAI) -> None:
    answer = client.completions.create(
        model="null-model",
        prompt=["a", "b"],
        n=2,
        max_tokens=4,
        temperature=1.0,
        seed=3,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset == [0, 1, 2, 3]


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="null-model",
        messages=USER,  # type: ignore[arg-type]
        max_completion_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content is not None
    assert len(choice.message.content) == 6
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(t.token for t in choice.logprobs.content) == choice.message.content
    assert all(len(t.top_logprobs) == 3 for t in choice.logprobs.content)


def test_a_streamed_chat_with_the_clients_own_accumulator(client: OpenAI) -> None:
    # The accumulator takes no answer that was cut off, so this one ends with a stop string.
    body = {"model": "null-model", "messages": USER, "temperature": 0, "stop": ["e", "t"]}
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**body)  # type: ignore[call-overload]
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_embeddings(client: OpenAI) -> None:
    # The client asks for base64 by itself, and gives floats.
    answer = client.embeddings.create(model="null-model", input=["one", "two", "one"])
    plain = client.embeddings.create(model="null-model", input="one", encoding_format="float")
    assert [e.index for e in answer.data] == [0, 1, 2]
    one, two, again = (e.embedding for e in answer.data)
    assert one == again == plain.data[0].embedding and one != two
    assert sum(v * v for v in one) == pytest.approx(1.0)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (9, 9)


def test_many_streams_at_once(server: Server) -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(
                    model="null-model",
                    prompt=f"prompt {i % 4}",
                    max_tokens=25,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            texts = await asyncio.gather(*(one(i) for i in range(32)))
        assert all(len(text) == 25 for text in texts)
        # Batched or not, the same prompt has the same answer.
        assert len(set(texts)) == 4
        assert all(texts[i] == texts[i % 4] for i in range(32))

    asyncio.run(main())


def test_leaving_a_stream_stops_it(server: Server) -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            for _ in range(10):
                stream = await client.completions.create(
                    model="null-model",
                    prompt="abc",
                    max_tokens=4000,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                async for _ in stream:
                    break
                await stream.close()
            load = {"running": -1}
            # Blocks come back when the last plan that uses them has ended; a leak ends in the test's timeout.
            while (
                load["running"]
                or load["waiting"]
                or load["server_load"]
                or load["free_blocks"] != load["total_blocks"]
            ):
                load = (await client.get("/../load", cast_to=object)) or {}  # type: ignore[assignment]
            assert load["server_load"] == 0

    asyncio.run(main())


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["null-model"]
    assert client.models.retrieve("null-model").id == "null-model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_clients_own_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="null-model", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model="null-model",
            messages=USER,  # type: ignore[arg-type]
            tools=[{"type": "function", "function": {"name": "a b"}}],
        )
    assert tools.value.param == "tools[0].function.name"
    with pytest.raises(openai.BadRequestError) as dimensions:
        client.embeddings.create(model="null-model", input="hi", dimensions=3)
    assert dimensions.value.param == "dimensions"
