"""Requests that can never be served are refused at the door, and the message names the field."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from pegainfer.contract import codec
from pegainfer.contract.errors import ConfigError, QueueFullError, RequestError
from pegainfer.contract.event import TokenEvent, TokenLogprob
from pegainfer.contract.request import (
    GenerateRequest,
    GrammarSpec,
    SamplingParams,
    hash_blocks,
    pack_tokens,
    root_hash,
)
from pegainfer.engine.scheduler import Scheduler, SchedulerConfig
from tests.null.engine.harness import BLOCK, Driver, null_config, request

PROMPT = [1, 2, 3, 4, 5]


def scheduler(**device: Any) -> Scheduler:
    return Driver(null_config(**device)).scheduler


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": 1e300}, "temperature"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"presence_penalty": 1e300}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"frequency_penalty": -1e300}, "frequency_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": ((32, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ({"logit_bias": ((1, 1e300),)}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (32,)}, "allowed_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((1,) * 1000,) * 17}, "bad_words"),
        ({"bad_words": ((1, 32),)}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_bad_sampling_values(sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        scheduler().add(request("r", PROMPT, **sampling), 0.0)
    assert caught.value.param == param
    assert "got" in str(caught.value) or "expected" in str(caught.value)


@pytest.mark.parametrize(
    "sampling", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"repetition_penalty": 0.0}]
)
def test_a_range_error_says_which_value(sampling: dict[str, Any]) -> None:
    """In a terminal there is no `param` beside the message."""
    with pytest.raises(RequestError) as caught:
        scheduler().add(request("r", PROMPT, **sampling), 0.0)
    assert str(caught.value).startswith(f"{next(iter(sampling))} is out of range; expected ")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": b""}, "prompt"),
        ({"prompt": b"\0\0\0"}, "prompt"),
        ({"prompt": pack_tokens([1, 32])}, "prompt"),
        ({"prompt": pack_tokens([1, -1])}, "prompt"),
        ({"prompt": pack_tokens([1] * 64)}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"priority": 2**31}, "priority"),
        ({"eos_token_ids": (-1,)}, "eos_token_ids"),
        ({"adapter": "a"}, "adapter"),
        ({"grammar": GrammarSpec("regex", "a*")}, "grammar"),
        ({"deadline": math.nan}, "deadline"),
        ({"block_hashes": b"x" * 32, "block_size": 8}, "block_size"),
        ({"block_hashes": b"x" * 64, "block_size": BLOCK}, "block_hashes"),
    ],
)
def test_bad_requests(changes: dict[str, Any], param: str) -> None:
    s = scheduler()
    with pytest.raises(RequestError) as caught:
        s.add(msgspec.structs.replace(request("r", PROMPT), **changes), 0.0)
    assert caught.value.param == param
    assert not s.has_work()
    assert s.stats().rejections == 1


def test_the_largest_values_pass() -> None:
    s = scheduler()
    s.add(request("r", [1] * 63, n=128, top_p=1.0, logprobs=20, seed=2**64 - 1, temperature=100.0), 0.0)
    assert s.stats().waiting == 128


@pytest.mark.parametrize("min_tokens", [0, 2])
def test_an_end_beyond_the_vocabulary_ends_nothing(min_tokens: int) -> None:
    """Neither is it masked while `min_tokens` forbids ends: it is the index of no logit."""
    answers = []
    for eos in ((5,), (5, 32, 2**31 - 1)):
        d = Driver(null_config(), SchedulerConfig())
        d.add(request("r", PROMPT, max_tokens=40, min_tokens=min_tokens, eos=eos))
        d.run()
        answers.append(d.answers["r", 0].tokens)
        assert all(new.mask_tokens == (5,) for plan in d.plans for new in plan.news)
    assert answers[0] == answers[1]


def test_the_front_may_send_the_hashes() -> None:
    packed = pack_tokens(PROMPT)
    hashes = b"".join(hash_blocks(packed, BLOCK, parent=root_hash(None, "")))
    s = scheduler()
    s.add(msgspec.structs.replace(request("r", PROMPT), block_hashes=hashes, block_size=BLOCK), 0.0)
    assert s.has_work()


def test_a_prompts_logprobs_fit_into_one_frame() -> None:
    """However long its numbers turn out: one event holds them all, and nobody could send it in parts."""
    num_tokens, top = 300, 20
    own = TokenLogprob(2**31 - 1, -0.1, 2**31 - 1, ((2**31 - 1, -0.1),) * top)
    event = TokenEvent(request_id="r", prompt_logprobs=(own,) * num_tokens)
    room = codec.prompt_logprobs_bytes(num_tokens, top)
    assert room - 2048 < len(codec.encode_frame(codec.Events([event]))) <= room + 512
    longest = codec.MAX_PROMPT_LOGPROBS // codec.prompt_logprobs_bytes(1, top)
    s = scheduler(max_model_len=1 << 18, num_blocks=(1 << 17,), max_tokens=1 << 18)
    s.add(request("a", [1] * longest, prompt_logprobs=top, max_tokens=1), 0.0)
    with pytest.raises(RequestError, match="ask for fewer alternatives") as failure:
        s.add(request("b", [1] * (longest + 1), prompt_logprobs=top, max_tokens=1), 0.0)
    assert failure.value.param == "prompt_logprobs"


def test_a_runner_without_prompt_logprobs() -> None:
    info = msgspec.structs.replace(Driver().runner.info, supports_prompt_logprobs=False)
    with pytest.raises(RequestError, match="prompt logprobs"):
        Scheduler(info).add(request("r", PROMPT, prompt_logprobs=1), 0.0)


def test_a_prompt_that_the_pool_cannot_hold() -> None:
    s = scheduler(num_blocks=(5,))  # 20 positions, so 21 tokens
    with pytest.raises(RequestError, match="at most 20 tokens"):
        s.add(request("r", [1] * 21), 0.0)
    with pytest.raises(RequestError, match="at most 21 tokens together") as caught:
        s.add(request("r", [1] * 11, max_tokens=11), 0.0)
    assert caught.value.param == "max_tokens"
    s.add(request("r", [1] * 11, max_tokens=10), 0.0)


def test_without_max_tokens_the_pool_is_the_context() -> None:
    d = Driver(null_config(num_blocks=(5,)))
    d.add(request("r", [1] * 11, eos=()))
    d.run()
    d.judge()
    assert len(d.answers["r", 0].tokens) == 10


def test_max_tokens_beyond_the_context_are_cut() -> None:
    d = Driver()
    d.add(request("r", [1] * 60, max_tokens=1000, eos=()))
    d.run()
    d.judge()
    assert len(d.answers["r", 0].tokens) == 4


def test_a_live_id_is_refused_and_free_again_after_the_finish() -> None:
    d = Driver()
    d.add(request("r", PROMPT, max_tokens=2))
    with pytest.raises(RequestError) as caught:
        d.scheduler.add(request("r", PROMPT), 0.0)
    assert caught.value.param == "request_id"
    d.run()
    d.scheduler.add(request("r", PROMPT), 0.0)


def test_the_queue_is_bounded_by_requests() -> None:
    s = Scheduler(Driver().runner.info, SchedulerConfig(max_waiting_requests=2))
    s.add(request("a", PROMPT), 0.0)
    s.add(request("b", PROMPT), 0.0)
    with pytest.raises(QueueFullError) as caught:
        s.add(request("c", PROMPT), 0.0)
    assert caught.value.retry_after >= 1.0
    assert s.stats().rejections == 1


def test_the_queue_is_bounded_by_tokens_but_takes_one_request_of_any_size() -> None:
    s = Scheduler(Driver().runner.info, SchedulerConfig(max_waiting_tokens=8))
    s.add(request("a", [1] * 40), 0.0)
    with pytest.raises(QueueFullError, match="40 tokens that wait"):
        s.add(request("b", [1]), 0.0)


def test_retry_after_grows_with_the_queue_and_the_pace() -> None:
    d = Driver(null_config(max_slots=1), SchedulerConfig(max_waiting_requests=3))
    for i in range(3):
        d.add(request(f"a{i}", PROMPT, max_tokens=4, eos=()))
        d.run()
    gap = d.answers["a2", 0].finish.timings.finished - d.answers["a1", 0].finish.timings.finished  # type: ignore[union-attr]
    for i in range(3):
        d.add(request(f"b{i}", PROMPT))
    with pytest.raises(QueueFullError) as caught:
        d.add(request("c", PROMPT))
    assert caught.value.retry_after == pytest.approx(3 * gap)


@pytest.mark.parametrize(
    "options",
    [
        {"max_slots": 0},
        {"max_prefill_tokens": 0},
        {"target_itl_ms": -1.0},
        {"max_wait_seconds": -1.0},
        {"watchdog_seconds": float("inf")},
        {"target_itl_ms": float("nan")},
        {"pipeline_depth": 3},
        {"watermark": 1.0},
        {"aging_seconds": 0.0},
        {"max_logprobs": -1},
        {"max_waiting_requests": 0},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SchedulerConfig(**options)


def test_a_runner_that_holds_nothing() -> None:
    info = msgspec.structs.replace(Driver().runner.info, num_blocks=(0,))
    with pytest.raises(ConfigError, match="cannot hold one sequence"):
        Scheduler(info)


def test_a_request_of_defaults_is_taken() -> None:
    s = scheduler()
    s.add(GenerateRequest(id="r", prompt=pack_tokens(PROMPT), sampling=SamplingParams()), 0.0)
    assert s.has_work()
