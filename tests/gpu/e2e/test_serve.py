"""`pegainfer serve` with the default model on a GPU, asked by curl and by the official client.

What an answer must be does not depend on the device: most tests are those of tests/e2e, on this server.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from pegainfer.runtime.cuda.driver import probe
from tests.e2e.frontend import test_real_model as real
from tests.e2e.frontend import test_tools_and_formats as formats
from tests.support.default_model import default_model
from tests.support.server import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if (reason := probe()) is not None:
        pytest.skip(reason)
    names = ("--served-model-name", "smol", "--served-model-name", "m")
    share = ("--gpu-memory-utilization", "0.2")
    with serving(str(default_model()), "--device", "cuda", *share, *names) as process:
        yield process


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


test_a_chat_streamed_and_whole = real.test_a_chat_names_paris_and_streams_the_same
test_a_stop_string = real.test_a_stop_string_across_tokens_is_never_shown
test_logprobs = real.test_logprobs_are_of_the_tokens_shown
test_prompt_logprobs = real.test_a_prompts_own_logprobs_by_echo
test_a_cached_prompt = real.test_a_repeated_prompt_is_cached_and_answered_alike
test_two_answers_by_seed = real.test_seeds_repeat
test_a_parsed_answer = formats.test_a_parsed_answer
test_a_conversation_with_tools = formats.test_a_conversation_with_results_goes_on
test_schemas = formats.test_schemas_of_many_kinds
test_regex_grammar_and_choice = formats.test_vllms_fields


# A cached prompt has other shapes than a new one, and a GPU other roundings then: what is sampled may differ,
# its form may not.


def test_tool_calls_whole_and_streamed(client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "m", "messages": formats.ASK, "tools": [formats.TOOL], "tool_choice": "required", "seed": 1,
        "max_tokens": 400, "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.parse(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, formats.Weather)


def test_parsed_answers_streamed(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "m", "messages": formats.ASK, "response_format": formats.Weather}
    with client.chat.completions.stream(**body, seed=4, max_tokens=300) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, formats.Weather)


def test_embeddings_are_those_of_the_cpu(client: OpenAI) -> None:
    texts = ["The cat sleeps on the mat.", "def fibonacci(n):", "Paris is the capital of France. " * 30, "a"]

    def vectors(client: OpenAI, model: str) -> np.ndarray[Any, Any]:
        answer = client.embeddings.create(model=model, input=texts)
        return np.array([e.embedding for e in answer.data])

    got = vectors(client, "m")
    with (
        serving(str(default_model()), "--activation-dtype", "f32", "--served-model-name", "exact") as exact,
        OpenAI(base_url=exact.url + "/v1", api_key="none", max_retries=0) as other,
    ):
        want = vectors(other, "exact")
    alike = got @ want.T  # cosines: each vector has length 1
    assert np.diag(alike).min() > 0.99
    assert (alike - np.eye(len(texts))).max() < np.diag(alike).min()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_whole_and_streamed(server: Server) -> None:
    body: dict[str, Any] = {"model": "smol", "messages": real.CAPITAL, "temperature": 0, "max_tokens": 40}

    def curl(**more: Any) -> str:
        command = [
            "curl",
            "-sSfN",
            server.url + "/v1/chat/completions",
            "-H",
            "Content-Type: application/json",
        ]
        data = json.dumps(body | more)
        return subprocess.run([*command, "-d", data], capture_output=True, text=True, check=True).stdout

    whole = json.loads(curl())["choices"][0]
    assert "Paris" in whole["message"]["content"] and whole["finish_reason"] == "stop"
    *events, done = (line.removeprefix("data: ") for line in curl(stream=True).splitlines() if line)
    assert done == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(d.get("content") or "" for d in deltas) == whole["message"]["content"]


def test_the_server_names_its_gpu(server: Server) -> None:
    assert any("NVIDIA" in line for line in server.said), server.said
