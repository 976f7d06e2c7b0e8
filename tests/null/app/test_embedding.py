"""LLM.embed: one vector a prompt, in order, by the null model's own definition of its hidden states."""

from __future__ import annotations

import math

import pytest

from pegainfer.contract.errors import RequestError
from tests.null.app.test_offline import GREEDY, over_null
from tests.null.engine.test_pooling import wanted


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_in_the_prompts_order(pooling: str) -> None:
    prompts = [f"{i} " * (1 + i % 40) for i in range(20)]
    with over_null() as llm:
        outputs = llm.embed(prompts, pooling=pooling, normalize=False)  # type: ignore[arg-type]
        assert [o.outputs.embedding for o in outputs] == [wanted(list(p.encode()), pooling) for p in prompts]
        assert [o.prompt_token_ids for o in outputs] == [list(p.encode()) for p in prompts]
        assert len({o.request_id for o in outputs}) == 20 and all(o.finished for o in outputs)
        (text,) = llm.generate("abc", GREEDY)  # the engine serves both
        assert text.outputs[0].token_ids


def test_vectors_have_length_one_unless_asked_otherwise() -> None:
    with over_null() as llm:
        (output,) = llm.embed([list(b"abc")])
    raw = wanted(list(b"abc"), "mean")
    assert math.hypot(*output.outputs.embedding) == pytest.approx(1.0, abs=1e-12)
    assert output.outputs.embedding == pytest.approx([v / math.hypot(*raw) for v in raw], abs=1e-12)


def test_faulty_requests_for_vectors() -> None:
    with over_null() as llm:
        with pytest.raises(RequestError, match="bad pooling; expected mean or last; got 'max'"):
            llm.embed("a", pooling="max")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="prompt 1: empty prompt"):
            llm.embed(["a", ""])
        with pytest.raises(RequestError, match="prompt 1: "):
            llm.embed(["a", "b" * 5000])  # beyond the context


def test_the_prefix_cache_is_forgotten() -> None:
    with over_null() as llm:
        prompt = "x" * 64
        llm.generate(prompt, GREEDY)
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 48  # its whole blocks but the last
        assert llm.reset_prefix_cache() is True
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_a_chat_with_another_template() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with over_null() as llm:
        (output,) = llm.chat(messages, GREEDY, chat_template="<{{ messages[0]['content'] }}>{{ mood }}",
                             chat_template_kwargs={"mood": "!"})  # fmt: skip
        assert output.prompt == "<hi>!"
        (output,) = llm.chat(messages, GREEDY)
        assert output.prompt is not None and output.prompt.startswith("<|im_start|>")
