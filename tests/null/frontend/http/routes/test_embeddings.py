"""POST /v1/embeddings: vectors of texts, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest

from pegainfer.null.model import chain_next, chain_start, hidden_state
from tests.support.asgi import ask, client, make_app
from tests.support.fake_engine import FakeEngine
from tests.support.null_engine import null_engine

PATH = "/v1/embeddings"


def embed(**fields: Any) -> tuple[dict[str, Any], FakeEngine]:
    engine = FakeEngine()
    response = ask(engine, PATH, {"input": "abc", **fields})
    assert response.status_code == 200, response.text
    return response.json(), engine


def refuse(**fields: Any) -> str:
    engine = FakeEngine()
    response = ask(engine, PATH, {"input": "abc", **fields})
    assert response.status_code == 400, response.text
    assert not engine.requests
    param: str = response.json()["error"]["param"]
    return param


def test_a_vector_in_openais_shape() -> None:
    answer, engine = embed(input="ab", normalize=False)
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [97.0, 98.0, 2.0]}],
        "model": "fake",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }
    sampling = engine.requests[0].sampling
    assert (sampling.pooling, sampling.max_tokens, sampling.ignore_eos) == ("mean", 1, True)
    assert embed(pooling="last")[1].requests[0].sampling.pooling == "last"


def test_vectors_have_length_one_unless_asked_otherwise() -> None:
    vector = embed(input="ab")[0]["data"][0]["embedding"]
    assert sum(v * v for v in vector) == pytest.approx(1.0)
    assert vector[0] / vector[1] == pytest.approx(97 / 98)


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        (["ab", "c"], [[97, 98, 2], [99, 99, 1]]),
        ([1, 2, 3], [[1, 3, 3]]),
        ([[1, 2], [3]], [[1, 2, 2], [3, 3, 1]]),
    ],
)
def test_many_inputs_and_token_ids(given: Any, vectors: Any) -> None:
    answer, _ = embed(input=given, normalize=False)
    assert [e["embedding"] for e in answer["data"]] == vectors
    assert [e["index"] for e in answer["data"]] == list(range(len(vectors)))
    assert answer["usage"]["prompt_tokens"] == sum(v[2] for v in vectors)


def test_base64_holds_the_same_numbers() -> None:
    text = embed(input="ab", normalize=False, encoding_format="base64")[0]["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(text)) == (97.0, 98.0, 2.0)


def test_a_text_is_cut_where_that_is_asked_for() -> None:
    assert embed(truncate_prompt_tokens=2, normalize=False)[0]["data"][0]["embedding"] == [98, 99, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], [999]]}, "input[1][0]"),
        ({"input": "x" * 256}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"dimensions": 3}, "dimensions"),
        ({"stream": True}, "stream"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_faults_are_named(fields: dict[str, Any], param: str) -> None:
    assert refuse(**fields) == param


def test_the_whole_engine_pools() -> None:
    with null_engine() as engine:

        async def main() -> None:
            async with client(make_app(engine)) as http:  # type: ignore[arg-type]
                states = [hidden_state(chain_next(chain_start(), ord("a")))]
                states.append(hidden_state(chain_next(chain_next(chain_start(), ord("a")), ord("b"))))
                for pooling, wanted in (
                    ("last", states[1]),
                    ("mean", [(x + y) / 2 for x, y in zip(*states, strict=True)]),
                ):
                    body = {"input": "ab", "pooling": pooling, "normalize": False}
                    answer = await http.post(PATH, json=body)
                    assert answer.json()["data"][0]["embedding"] == wanted

        asyncio.run(main())
