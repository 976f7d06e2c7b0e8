"""AsyncLLM: answers as they are written, beside each other, given up, refused; over the null device."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest

from pegainfer import AsyncLLM, RequestOutputKind, SamplingParams
from pegainfer.app.engine_slot import EngineSlot
from pegainfer.app.text import TextSide
from pegainfer.contract.errors import RequestError
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.null.config import NullConfig
from pegainfer.null.runner import NullRunner
from tests.null.app.test_offline import shown, wanted
from tests.support.null_engine import null_info

PATIENCE = 60.0


def over_null(**null: Any) -> AsyncLLM:
    runner = NullRunner(NullConfig(max_slots=4, **null))
    return AsyncLLM.over(InProcessEngine(runner, null_info(runner)), TextSide(byte_tokenizer(), None))


def greedy(kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, output_kind=kind, **{"max_tokens": 24, **more})


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


def test_each_output_has_what_there_is_so_far() -> None:
    async def main() -> None:
        async with over_null() as llm:
            outputs = [o async for o in llm.generate("abc", greedy(ignore_eos=True))]
        texts = [o.outputs[0].text for o in outputs]
        assert all(later.startswith(before) for before, later in itertools.pairwise(texts))
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [o.outputs[0].finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert len(outputs[-1].outputs[0].token_ids) == 24
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert outputs[-1].prompt == "abc"

    run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_make_up_the_answer(n: int) -> None:
    async def main() -> None:
        async with over_null() as llm:
            params = greedy(RequestOutputKind.DELTA, n=n, logprobs=1)
            outputs = [o async for o in llm.generate("abc", params)]
        for index in range(n):
            parts = [c for o in outputs for c in o.outputs if c.index == index]
            tokens = [t for c in parts for t in c.token_ids]
            assert tokens == wanted("abc")
            assert "".join(c.text for c in parts) == shown(tokens)
            assert [t for c in parts for entry in c.logprobs or () for t in list(entry)[:1]] == tokens
            assert [c.finish_reason is not None for c in parts] == [False] * (len(parts) - 1) + [True]

    run(main())


def test_the_last_output_alone() -> None:
    async def main() -> None:
        async with over_null() as llm:
            (output,) = [o async for o in llm.generate("abc", greedy(RequestOutputKind.FINAL_ONLY))]
        assert output.finished and output.outputs[0].token_ids == wanted("abc")

    run(main())


def test_requests_run_beside_each_other() -> None:
    async def answer(llm: AsyncLLM, prompt: str) -> list[int]:
        last = [o async for o in llm.generate(prompt, greedy(RequestOutputKind.FINAL_ONLY))][-1]
        return last.outputs[0].token_ids

    async def main() -> None:
        prompts = [f"{i} " * (1 + i % 20) for i in range(40)]
        async with over_null() as llm:
            found = await asyncio.gather(*(answer(llm, prompt) for prompt in prompts))
        assert found == [wanted(prompt) for prompt in prompts]

    run(main())


async def until_idle(llm: AsyncLLM) -> None:
    while llm.stats().running or llm.stats().waiting or llm.stats().in_flight:
        await asyncio.sleep(0.005)


def test_who_leaves_cancels_and_who_is_aborted_ends() -> None:
    async def main() -> None:
        async with over_null(step_seconds=0.001) as llm:
            long = greedy(ignore_eos=True, max_tokens=4000)
            async with contextlib.aclosing(llm.generate("abc", long)) as outputs:
                async for _ in outputs:
                    break
            await until_idle(llm)
            seen = []
            async for output in llm.generate("abc", long, "mine"):
                if not seen:
                    await llm.abort("mine")
                seen.append(output)
            assert seen[-1].outputs[0].finish_reason == "abort"
            assert len(seen[-1].outputs[0].token_ids) < 4000
            assert llm.stats().finished.get("length", 0) == 0

    run(main())


def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    text = shown(wanted("abc"))

    async def main() -> None:
        async with over_null() as llm:
            params = greedy(ignore_eos=True, max_tokens=4000, stop=text[3:6])
            last = [o async for o in llm.generate("abc", params)][-1]
            assert (last.outputs[0].text, last.outputs[0].stop_reason) == (text[:3], text[3:6])
            await until_idle(llm)

    run(main())


def test_faulty_requests() -> None:
    async def main() -> None:
        async with over_null() as llm:
            for prompt, params, expected in (
                ("", greedy(), "empty prompt"),
                ("a", SamplingParams(top_p=7.0), "top_p"),
                ("a" * 5000, greedy(), "context|max_model_len|too long"),
            ):
                with pytest.raises(RequestError, match=expected):
                    _ = [o async for o in llm.generate(prompt, params)]
            with pytest.raises(RequestError, match="bad request_id"):
                _ = [o async for o in llm.generate("a", greedy(), "")]
            assert await llm.reset_prefix_cache() is True

    run(main())


def test_a_model_sleeps_after_its_requests_and_answers_as_before() -> None:
    def make() -> InProcessEngine:
        runner = NullRunner(NullConfig(max_slots=4, step_seconds=0.005))
        return InProcessEngine(runner, null_info(runner))

    async def main() -> None:
        async with AsyncLLM.over(make(), TextSide(byte_tokenizer(), None)) as llm:
            llm._slot = EngineSlot(llm._engine, make)
            before = asyncio.ensure_future(last(llm, "abc"))
            while not llm.stats().running:
                await asyncio.sleep(0.001)
            await llm.sleep()
            assert await llm.is_sleeping()
            assert len((await before).outputs[0].token_ids) == 24
            with pytest.raises(RequestError, match="asleep"):
                await last(llm, "abc")
            await llm.wake_up()
            assert not await llm.is_sleeping()
            assert (await last(llm, "abc")).outputs == (await before).outputs
            assert llm.get_metrics()

    async def last(llm: AsyncLLM, prompt: str) -> Any:
        return [o async for o in llm.generate(prompt, greedy(ignore_eos=True))][-1]

    run(main())
