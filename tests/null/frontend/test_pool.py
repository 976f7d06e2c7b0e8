"""Jobs with a deadline: their results, their faults, and the death of a worker."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator

import pytest

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.frontend.grammar.cache import GrammarCache
from pegainfer.frontend.grammar.compiler import GrammarJob
from pegainfer.frontend.grammar.vocabulary import vocabulary_of
from pegainfer.frontend.pool import WorkerPool
from pegainfer.frontend.worker import Setup, TemplateJob

NOW = datetime.datetime(2026, 11, 28)
# More rounds than anybody can wait for, none of which shows anything.
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    tokenizer = byte_tokenizer()
    setup = Setup(vocabulary_of(tokenizer), tokenizer.chat_template, {"eos_token": "<|im_end|>"})
    pool = WorkerPool(lambda: setup, size=1)
    yield pool
    pool.close()


def run(pool: WorkerPool, *jobs: GrammarJob | TemplateJob, seconds: float = 30.0) -> list[str | Exception]:
    async def main() -> list[str | Exception]:
        calls = (pool.run(job, seconds, "the work") for job in jobs)
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [r if isinstance(r, str) else Exception(str(r)) for r in results]

    return asyncio.run(main())


def test_results_come_back(pool: WorkerPool) -> None:
    messages = [{"role": "user", "content": "hi"}]
    grammar, chat = run(
        pool,
        GrammarJob("choice", '["a", "b"]'),
        TemplateJob({"messages": messages, "add_generation_prompt": 0}, NOW),
    )
    assert isinstance(grammar, str) and "start" in grammar
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_jobs_fault_is_told_and_the_worker_lives_on(pool: WorkerPool) -> None:
    bad, good = run(pool, GrammarJob("regex", "("), GrammarJob("regex", "a"))
    assert "unclosed group" in str(bad)
    assert isinstance(good, str)


def test_an_endless_job_is_killed_and_the_next_is_served(pool: WorkerPool) -> None:
    (late,) = run(pool, TemplateJob({"messages": []}, NOW, ENDLESS), seconds=0.5)
    assert "at most 0.5 s of work" in str(late)
    assert run(pool, TemplateJob({}, NOW, "fine")) == ["fine"]


def test_a_job_that_eats_all_memory_ends_alone(pool: WorkerPool) -> None:
    (greedy,) = run(pool, TemplateJob({}, NOW, "{{ ('a' * 9999999999) | length }}"))
    assert isinstance(greedy, Exception)
    assert run(pool, TemplateJob({}, NOW, "fine")) == ["fine"]


def test_no_more_jobs_wait_than_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegainfer.frontend.pool.MAX_JOBS", 2)
    pool = WorkerPool(lambda: Setup(vocabulary_of(byte_tokenizer()), None, {}), size=1)

    async def three() -> list[str | BaseException]:
        endless = pool.run(TemplateJob({}, NOW, ENDLESS), 0.5, "the work")
        others = [pool.run(TemplateJob({}, NOW, "fine"), 30.0, "the work") for _ in range(2)]
        return await asyncio.gather(endless, *others, return_exceptions=True)

    for _ in range(2):  # places come back, of jobs that failed too
        late, waited, refused = asyncio.run(three())
        assert "at most 0.5 s of work" in str(late)
        assert waited == "fine"
        assert "too many requests wait for the work; got 2" in str(refused)
    pool.close()


def test_grammars_and_their_faults_are_kept(pool: WorkerPool) -> None:
    async def main() -> None:
        cache = GrammarCache(pool, 30.0)
        job, bad = GrammarJob("regex", "kept"), GrammarJob("regex", "(kept")
        first, again = await asyncio.gather(cache.get(job), cache.get(job))
        assert first is again is await cache.get(job)
        for _ in range(2):
            with pytest.raises(RequestError, match="unclosed group"):
                await cache.get(bad)

    asyncio.run(main())
