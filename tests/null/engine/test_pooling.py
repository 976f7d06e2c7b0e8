"""Requests for vectors on the null device: delivered with the finish, whatever the scheduler does to them."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from pegainfer.contract.errors import RequestError
from pegainfer.contract.event import FinishReason
from pegainfer.engine.config import SchedulerConfig
from pegainfer.null.model import chain_next, chain_start, hidden_state
from tests.null.engine.harness import Driver, null_config, request


def wanted(tokens: list[int], pooling: str) -> list[float]:
    """By the null model's own definition."""
    chain = chain_start()
    states = []
    for token in tokens:
        chain = chain_next(chain, token)
        states.append(hidden_state(chain))
    if pooling == "last":
        return states[-1]
    mean = [sum(column) / len(states) for column in zip(*states, strict=True)]
    return list(struct.unpack("<8f", struct.pack("<8f", *mean)))


def asks(pooling: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "pooling": pooling, "ignore_eos": True}


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_vector_comes_with_the_finish(pooling: str) -> None:
    prompt = [(7 * i) % 30 + 1 for i in range(23)]
    driver = Driver(null_config(max_tokens=5), SchedulerConfig())
    driver.add(request("a", prompt, **asks(pooling)))
    driver.run()
    events = driver.answers["a", 0].events
    assert [e.embedding is None for e in events] == [True] * (len(events) - 1) + [False]
    last = events[-1]
    assert last.finish is FinishReason.LENGTH and last.embedding is not None
    assert list(struct.unpack("<8f", last.embedding)) == wanted(prompt, pooling)


def test_a_mean_takes_nothing_from_the_cache_and_a_last_state_does() -> None:
    prompt = [(5 * i) % 30 + 1 for i in range(21)]
    driver = Driver(null_config(), SchedulerConfig())
    driver.add(request("first", prompt, **asks(None)))
    driver.run()
    cached = {}
    for pooling in ("mean", "last"):
        driver.add(request(pooling, prompt, **asks(pooling)))
        driver.run()
        end = driver.answers[pooling, 0].finish
        assert end is not None
        cached[pooling] = end.num_cached_tokens
    assert cached == {"mean": 0, "last": 20}


def test_what_cannot_be_pooled_is_refused() -> None:
    driver = Driver(null_config(), SchedulerConfig())
    with pytest.raises(RequestError) as refused:
        driver.scheduler.add(request("a", [1, 2], max_tokens=2, pooling="mean"), 0.0)
    assert refused.value.param == "max_tokens"
