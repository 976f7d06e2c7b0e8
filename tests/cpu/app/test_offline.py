"""The offline API with the default model."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pegainfer import LLM, SamplingParams
from pegainfer.contract.errors import RequestError
from tests.support.default_model import default_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(default_model()), max_model_len=1024, activation_dtype="f32") as found:
        yield found


def test_a_chat_answers(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=64))
    (c,) = output.outputs
    assert c.text == "The capital of France is Paris."
    assert (c.finish_reason, c.stop_reason) == ("stop", None)
    assert c.token_ids[-1] in llm.get_tokenizer().eos_token_ids


def test_constraints_reach_the_kernels(llm: LLM) -> None:
    """Bias, allowed tokens, bad words and min_tokens on real logits."""
    tokenizer = llm.get_tokenizer()
    (paris,) = tokenizer.encode(" Paris")
    yes, no = (tokenizer.encode(w)[0] for w in ("Yes", "No"))
    greedy = {"temperature": 0, "max_tokens": 12}
    chats = [QUESTION] * 4
    params = [
        SamplingParams(**greedy, logit_bias={paris: -100.0}),
        SamplingParams(**greedy, allowed_token_ids=[yes, no]),
        SamplingParams(**greedy, bad_words=["Paris"]),
        SamplingParams(**greedy, min_tokens=10),
    ]
    without, only, banned, longer = (o.outputs[0] for o in llm.chat(chats, params))
    assert paris not in without.token_ids
    assert set(only.token_ids) <= {yes, no}
    assert "Paris" not in banned.text
    assert banned.text.startswith("The capital of France is")
    ended = llm.chat(QUESTION, SamplingParams(**greedy))[0].outputs[0].token_ids
    assert len(ended) < 10  # by an EOS, which min_tokens forbids
    assert longer.token_ids[: len(ended) - 1] == ended[:-1]
    assert len(longer.token_ids) >= 10


def test_a_score_is_the_probability_of_yes(llm: LLM) -> None:
    """As two requests tell it that draw yes and no alone."""
    output, other = llm.score("capital of France", ["It is Paris.", "A banana."], score_method="yes-no")
    ids = output.prompt_token_ids
    text = llm.get_tokenizer().decode(ids, skip_special_tokens=False)
    assert text.endswith("<Document>: It is Paris.<|im_end|>\n<|im_start|>assistant\n")
    logprobs = []
    for word in ("yes", "no"):
        (token,) = llm.get_tokenizer().encode(word)
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[token], logprobs=0)
        found = llm.generate(ids, params)[0].outputs[0].logprobs
        assert found is not None
        logprobs.append(found[0][token].logprob)
    assert output.outputs.score == pytest.approx(1 / (1 + math.exp(logprobs[1] - logprobs[0])), abs=1e-6)
    assert 0 < other.outputs.score < output.outputs.score < 1


def test_a_context_filled_to_its_last_token() -> None:
    """By prompt and answer, or by a prompt that is only scored: as in a larger context."""
    ids = [*range(1000, 1064)]
    scored = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    with LLM(str(default_model()), max_model_len=128, activation_dtype="f32") as llm:
        (wide,) = llm.generate([ids], scored)
        (more,) = llm.generate([ids[:-8]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    with LLM(str(default_model()), max_model_len=64, activation_dtype="f32") as llm:
        (tight,) = llm.generate([ids], scored)
        (answer,) = llm.generate([ids[:-8]], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert tight.prompt_logprobs == wide.prompt_logprobs
    assert tight.prompt_logprobs is not None and len(tight.prompt_logprobs) == 64
    assert answer.outputs[0].token_ids == more.outputs[0].token_ids


def test_a_request_that_leaves_nothing_to_draw_is_told_so(llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_ids[0]
    with pytest.raises(RequestError, match="leave no token that could be drawn; remedy: allow more tokens"):
        llm.chat(QUESTION, SamplingParams(max_tokens=8, min_tokens=3, allowed_token_ids=[eos]))


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def drawn(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, max_tokens=24, seed=seed, ignore_eos=True)
        return llm.chat(QUESTION, params)[0].outputs[0].token_ids

    assert drawn(1) == drawn(1)
    assert len({tuple(drawn(s)) for s in (1, 2, 3)}) == 3
    assert drawn(None) != drawn(None)


def test_a_program_needs_no_model_framework() -> None:
    program = (
        "import sys\n"
        "from pegainfer import LLM, SamplingParams\n"
        f"with LLM({str(default_model())!r}, max_model_len=256) as llm:\n"
        "    (output,) = llm.generate('The sea', SamplingParams(temperature=0, max_tokens=4))\n"
        "    print(output.outputs[0].token_ids)\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split(",")) == 4
