"""Refuses requests that can never be served, before anything is kept of them."""

from __future__ import annotations

import math
from array import array

import numpy as np

from pegainfer.contract.codec import MAX_PROMPT_LOGPROBS, prompt_logprobs_bytes
from pegainfer.contract.errors import RequestError
from pegainfer.contract.request import (
    HASH_BYTES,
    LARGEST,
    NUMBERS,
    GenerateRequest,
    SamplingParams,
    token_array,
)
from pegainfer.contract.step import RunnerInfo
from pegainfer.engine.config import SchedulerConfig

MAX_BAD_TOKENS = 1 << 14  # of a request's bad words together: every step of its batch goes through them
# The engine's bounds of the parameters in NUMBERS, worked out once instead of for every request: name, lowest
# and highest, and of fractions also whether the lowest itself is refused.
_BOUNDS = [(name, n.engine or (n.low, n.high), n.above) for name, n in NUMBERS.items() if not n.whole]
_WHOLE_BOUNDS = [(name, n.engine or (n.low, n.high)) for name, n in NUMBERS.items() if n.whole]


def check_request(
    request: GenerateRequest, info: RunnerInfo, config: SchedulerConfig, block_size: int, reach: int
) -> array[int]:
    """Raises RequestError that names the field at fault; returns the prompt's token ids.

    Args:
        block_size: tokens a hash of `request.block_hashes` must stand for.
        reach: tokens of a sequence that the KV pools can hold when it runs alone.
    """
    tokens = _prompt(request, info, block_size)
    end = min(info.max_model_len, reach)
    longest = end if request.sampling.max_tokens == 0 else end - 1
    if len(tokens) > longest:
        raise RequestError(
            "the prompt leaves no room for an answer",
            expected=f"at most {longest} tokens",
            got=len(tokens),
            param="prompt",
            remedy="shorten the prompt or start the engine with a larger context",
        )
    wanted = min(len(tokens) + (request.sampling.max_tokens or 0), info.max_model_len)
    if wanted > reach:
        raise RequestError(
            "the request needs more KV blocks than the engine has",
            expected=f"prompt and max_tokens of at most {reach} tokens together",
            got=wanted,
            param="max_tokens",
            remedy="lower max_tokens or give the engine more KV blocks",
        )
    _integer("n", request.n, 1, config.max_n)
    _integer("priority", request.priority, -(2**31), 2**31 - 1)
    if request.grammar is not None:
        sampling = request.sampling
        # Together they could leave nothing to draw in the middle of an answer.
        if sampling.allowed_token_ids is not None or sampling.bad_words:
            name = "bad_words" if sampling.bad_words else "allowed_token_ids"
            raise RequestError(
                f"{name} and a grammar exclude each other", expected="one of the two", got="both", param=name
            )
    if request.deadline is not None and not math.isfinite(request.deadline):
        raise RequestError("bad deadline", expected="finite seconds", got=request.deadline, param="deadline")
    for token in request.eos_token_ids:
        _integer("eos_token_ids", token, 0, 2**31 - 1)
    _check_sampling(request.sampling, info, config)
    _check_prompt_logprobs(request.sampling.prompt_logprobs, len(tokens))
    return tokens


def _prompt(request: GenerateRequest, info: RunnerInfo, block_size: int) -> array[int]:
    if not request.prompt or len(request.prompt) % 4:
        raise RequestError(
            "bad prompt",
            expected="int32 token ids, at least one",
            got=f"{len(request.prompt)} bytes",
            param="prompt",
        )
    tokens = token_array(request.prompt)
    # One pass for both bounds: a negative id read as unsigned is above every vocabulary.
    if int(np.frombuffer(request.prompt, "<u4").max()) >= info.vocab_size:
        low, high = min(tokens), max(tokens)
        raise RequestError(
            "token id out of the vocabulary",
            expected=f"0..{info.vocab_size - 1}",
            got=low if low < 0 else high,
            param="prompt",
        )
    if request.block_hashes:
        full = len(tokens) // block_size
        if request.block_size != block_size:
            raise RequestError(
                "block hashes of another block size",
                expected=block_size,
                got=request.block_size,
                param="block_size",
            )
        if len(request.block_hashes) != full * HASH_BYTES:
            raise RequestError(
                "wrong number of block hashes",
                expected=f"{full * HASH_BYTES} bytes for {full} full blocks",
                got=len(request.block_hashes),
                param="block_hashes",
            )
    return tokens


def _check_sampling(s: SamplingParams, info: RunnerInfo, config: SchedulerConfig) -> None:
    for name, (low, high) in _WHOLE_BOUNDS:
        _integer(name, getattr(s, name), int(low), int(high))
    for name, (low, high), above in _BOUNDS:
        value = getattr(s, name)
        _number(name, value, low, high)
        if above and value == low:
            raise RequestError(f"{name} is out of range", expected=f"> {low:g}", got=value, param=name)
    _integer("min_tokens", s.min_tokens, 0, 2**31 - 1)
    if s.max_tokens is not None:
        _integer("max_tokens", s.max_tokens, 0, 2**31 - 1)
        if s.min_tokens > s.max_tokens:
            raise RequestError(
                "min_tokens exceeds max_tokens",
                expected=f"≤ {s.max_tokens}",
                got=s.min_tokens,
                param="min_tokens",
            )
    if s.seed is not None:
        _integer("seed", s.seed, -(2**63), 2**64 - 1)
    last = info.vocab_size - 1
    for token, bias in s.logit_bias:
        _integer("logit_bias", token, 0, last)
        _number("logit_bias", bias, -LARGEST, LARGEST)
    if s.allowed_token_ids is not None:
        if not s.allowed_token_ids:
            raise RequestError("no token is allowed", expected="at least one id", param="allowed_token_ids")
        for token in s.allowed_token_ids:
            _integer("allowed_token_ids", token, 0, last)
    for token in s.stop_token_ids:
        _integer("stop_token_ids", token, 0, last)
    bad_tokens = sum(map(len, s.bad_words))
    if bad_tokens > MAX_BAD_TOKENS:
        raise RequestError(
            "the bad words are too long together",
            expected=f"at most {MAX_BAD_TOKENS} tokens",
            got=bad_tokens,
            param="bad_words",
        )
    for word in s.bad_words:
        if not word:
            raise RequestError("empty bad word", expected="at least one token id", param="bad_words")
        for token in word:
            _integer("bad_words", token, 0, last)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(s, name)
        if count is not None:
            _integer(name, count, 0, config.max_logprobs)
    if s.prompt_logprobs is not None and not info.supports_prompt_logprobs:
        raise RequestError("this model line gives no prompt logprobs", param="prompt_logprobs")
    if s.pooling is not None and not info.supports_pooling:
        raise RequestError("hidden states cannot be had on this device", param="pooling")
    if s.pooling is not None and s.max_tokens != 1:
        raise RequestError("pooling wants no text", expected=1, got=s.max_tokens, param="max_tokens")


def _check_prompt_logprobs(top: int | None, num_tokens: int) -> None:
    if top is not None and prompt_logprobs_bytes(num_tokens, top) > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            "too many logprobs of the prompt",
            expected=f"at most {MAX_PROMPT_LOGPROBS} bytes of them",
            got=f"{top} alternatives for each of {num_tokens} tokens",
            param="prompt_logprobs",
            remedy="ask for fewer alternatives, or shorten the prompt",
        )


def _integer(param: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{param} is out of range", expected=f"{low}..{high}", got=value, param=param)


def _number(param: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(
            f"{param} is out of range", expected=f"a finite number in {low}..{high}", got=value, param=param
        )
