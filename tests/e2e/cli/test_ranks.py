"""`pegainfer serve --tensor-parallel-size`: answers, ends, and what becomes of a rank that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cli.test_serve import ended, open_stream
from tests.support.servedqwen3 import write_served_folder
from tests.support.server import Server, children_of, pega, serving

BODY = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_folder(tmp_path_factory.mktemp("model"))


def answer(server: Server) -> str:
    response = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def wanted(model: Path) -> str:
    with serving("--model", str(model)) as server:
        return answer(server)


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with serving("--model", str(model), "--tensor-parallel-size", "2", "--engine-restarts", "1") as made:
        yield made


def processes(server: Server) -> tuple[int, int]:
    """The engine's process and that of rank 1."""
    (engine,) = server.children()
    (rank,) = children_of(engine)
    return engine, rank


def test_two_ranks_answer_as_one_and_end_with_the_server(server: Server, wanted: str) -> None:
    assert "2 ranks of" in server.said[0]
    assert answer(server) == wanted
    engine, rank = processes(server)
    assert server.stop() == 0
    assert ended(engine) and ended(rank)
    assert server.errors.read_text() == ""


def test_a_killed_rank_is_named_and_the_group_is_replaced_once(server: Server, wanted: str) -> None:
    for last in (False, True):
        engine, rank = processes(server)
        response = open_stream(server, max_tokens=400)
        began = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        assert b"rank 1 has ended; got SIGKILL" in response.read()
        assert time.monotonic() - began < 5.0
        assert ended(engine)
        if not last:
            while httpx.get(f"{server.url}/health").status_code != 200:
                time.sleep(0.05)
            assert answer(server) == wanted
    assert server.process.wait(60) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_its_engine(server: Server, number: int) -> None:
    engine, rank = processes(server)
    os.kill(engine, number)
    assert ended(engine) and ended(rank)


def test_a_number_of_ranks_that_does_not_divide_the_model(model: Path) -> None:
    done = pega("serve", "--model", str(model), "--tensor-parallel-size", "3", "--port", "0")
    assert done.returncode == 2
    assert (
        "this model does not divide among so many ranks; expected a divisor of 4 query heads" in done.stderr
    )
