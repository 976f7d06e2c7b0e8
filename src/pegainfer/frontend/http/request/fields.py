"""The fields that routes share, and how they become the engine's sampling parameters."""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from pegainfer.contract.request import GREEDY_BELOW, INT32_MAX, NUMBERS, SamplingParams
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.request.formats import ResponseFormat, StructuredOutputs
from pegainfer.frontend.http.request.limits import at_most, bad_value, in_range
from pegainfer.frontend.http.request.neutral import Harmless
from pegainfer.frontend.http.request.sampling_defaults import SamplingDefaults

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

TokenIds = list[int]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Hints(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every route that cannot change the answer: there is one tier, and every prefix is cached."""

    cache_prompt: Harmless = None
    id_slot: Harmless = None
    keep_alive: Harmless = None
    metadata: Harmless = None
    prediction: Harmless = None
    prompt_cache_options: Harmless = None
    prompt_cache_retention: Harmless = None
    service_tier: Harmless = None
    store: Harmless = None
    verbosity: Harmless = None


class CommonFields(Hints, kw_only=True):
    """What every route that generates takes. Null means the same as absent for every field, as OpenAI has
    it for nearly all."""

    model: str | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 and -1: off
    min_p: float | None = None
    seed: int | None = None  # -1: none
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    user: str | None = None  # written to the debug log with the request's id
    priority: int | None = None  # lower runs first
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    request_id: str | None = None  # for /v1/abort, and in the answer's id
    timeout: float | None = None  # seconds until the request is given up


class GenerateFields(CommonFields, kw_only=True):
    """Of completions and chat."""

    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None  # default: true for a text, false for a rendered chat
    truncate_prompt_tokens: int | None = None  # keep only so many of the prompt's last tokens
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Special tokens are decoded by their bytes, so that no spaces come between them either way.
    spaces_between_special_tokens: Harmless = None
    # `Any` marks what users of other servers know and this one does not serve: see neutral.py.
    best_of: Any = None
    kv_transfer_params: Any = None


# The fields that responses and messages hand on to the chat that they stand for.
SHARED = tuple(n for n in CommonFields.__struct_fields__ if n not in Hints.__struct_fields__)


def request_id(request: GenerateFields) -> str:
    """The client's name for the request, or a new one. Raises ApiError (400)."""
    if request.request_id is None:
        return uuid.uuid4().hex
    if not REQUEST_ID.fullmatch(request.request_id):
        raise bad_value("request_id", "1 to 128 printable ASCII characters", repr(request.request_id))
    return request.request_id


def stop_strings(request: GenerateFields, config: HttpConfig) -> tuple[str, ...]:
    """Each stop string once. Raises ApiError (400)."""
    stop = request.stop
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    at_most("stop", len(strings), config.max_stop_strings, "strings")
    for i, text in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{i}]"
        if not text:
            raise bad_value(param, "a string to stop at", "an empty one")
        at_most(param, len(text.encode()), config.max_stop_bytes, "bytes")
    return tuple(dict.fromkeys(strings))


def token_limit(param: str, value: int | None, least: int = 1) -> int | None:
    """A bound on the answer's length; -1 stands for no bound, as at llama.cpp. Raises ApiError (400)."""
    if value is None:
        return None
    if value == -1:
        return INT32_MAX
    return count(param, value, least, least, INT32_MAX)


def timeout_seconds(request: GenerateFields, config: HttpConfig) -> float | None:
    """None where the request has no end of its own. Raises ApiError (400)."""
    if request.timeout is not None and not 0 < request.timeout <= config.max_timeout_seconds:
        raise bad_value("timeout", f"0 < timeout ≤ {config.max_timeout_seconds:g} seconds", request.timeout)
    return request.timeout


def count(param: str, value: int | None, default: int, low: int, high: int) -> int:
    """A bounded integer field."""
    if value is None:
        return default
    in_range(param, value, low, high)
    return value


def sampling_numbers(request: CommonFields, defaults: SamplingDefaults) -> dict[str, Any]:
    """Each parameter in `NUMBERS`, or its default. Raises ApiError (400) where one is out of its range."""
    out = dict(defaults.numbers)
    for name, number in NUMBERS.items():
        value: float | None = getattr(request, name)
        if value is None:
            continue
        if not number.in_request(value):
            less = "<" if number.above else "≤"
            raise bad_value(name, f"{number.low} {less} {name} ≤ {number.high}", value)
        out[name] = value
    return out


def check_token_ids(param: str, ids: TokenIds, vocab_size: int) -> None:
    """Raises ApiError (400) that names the first id which the model does not have."""
    try:
        msgspec.convert(ids, _ids_below(vocab_size))  # 16,000 of them in 0.2 ms
    except msgspec.ValidationError:
        i = next(i for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise bad_value(f"{param}[{i}]", f"a token id from 0 to {vocab_size - 1}", ids[i]) from None


@functools.cache
def _ids_below(vocab_size: int) -> Any:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def sampling_params(
    request: GenerateFields,
    *,
    defaults: SamplingDefaults,
    config: HttpConfig,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    encode: Callable[[str], TokenIds],
) -> SamplingParams:
    """Checks every sampling field and builds what the engine takes. Raises ApiError (400).

    Args:
        max_tokens: as the request has it; None takes the default.
        encode: text to ids without special tokens, for bad_words.
    """
    r, d = request, defaults
    if max_tokens is None:
        max_tokens = d.max_tokens
    numbers = sampling_numbers(r, d)
    if numbers["temperature"] < GREEDY_BELOW:
        numbers["temperature"] = 0.0
    numbers["top_k"] = max(numbers["top_k"], 0)
    min_tokens = count("min_tokens", r.min_tokens, 0, 0, INT32_MAX)
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_value("min_tokens", f"≤ max_tokens = {max_tokens}", min_tokens)
    seed = None if r.seed == -1 else r.seed
    if seed is not None:
        in_range("seed", seed, -(2**63), 2**63 - 1)
    return SamplingParams(
        **numbers,
        seed=seed,
        logit_bias=_logit_bias(r, config, vocab_size),
        allowed_token_ids=_allowed(r, vocab_size),
        bad_words=_bad_words(r, config, encode),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop_token_ids=_stop_token_ids(r, config, vocab_size),
        ignore_eos=bool(r.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(r: GenerateFields, config: HttpConfig, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not r.logit_bias:
        return ()
    at_most("logit_bias", len(r.logit_bias), config.max_logit_bias, "entries")
    out: dict[int, float] = {}
    for key, bias in r.logit_bias.items():
        # isdecimal alone would let other scripts' digits and thousands of leading zeros through.
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else -1
        if not 0 <= token < vocab_size:
            raise bad_value("logit_bias", f"token ids from 0 to {vocab_size - 1} as keys", repr(key))
        if token in out:
            raise bad_value("logit_bias", "each token id once", repr(key))
        in_range("logit_bias", bias, -100.0, 100.0)
        out[token] = bias
    return tuple(out.items())


def _allowed(r: GenerateFields, vocab_size: int) -> tuple[int, ...] | None:
    if r.allowed_token_ids is None:
        return None
    if not r.allowed_token_ids:
        raise bad_value("allowed_token_ids", "at least one token id", "none")
    at_most("allowed_token_ids", len(r.allowed_token_ids), vocab_size, "ids")
    check_token_ids("allowed_token_ids", r.allowed_token_ids, vocab_size)
    return tuple(sorted(set(r.allowed_token_ids)))


def _stop_token_ids(r: GenerateFields, config: HttpConfig, vocab_size: int) -> tuple[int, ...]:
    if not r.stop_token_ids:
        return ()
    at_most("stop_token_ids", len(r.stop_token_ids), config.max_logit_bias, "ids")
    check_token_ids("stop_token_ids", r.stop_token_ids, vocab_size)
    return tuple(sorted(set(r.stop_token_ids)))


def _bad_words(
    r: GenerateFields, config: HttpConfig, encode: Callable[[str], TokenIds]
) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenised at a text's start and after a blank, for both spell it in the output."""
    if not r.bad_words:
        return ()
    at_most("bad_words", len(r.bad_words), config.max_logit_bias, "words")
    out: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(r.bad_words):
        at_most(f"bad_words[{i}]", len(word.encode()), config.max_stop_bytes, "bytes")
        for text in (word, " " + word.lstrip(" ")):
            ids = tuple(encode(text))
            if not word.strip() or not ids:
                raise bad_value(f"bad_words[{i}]", "a word", repr(word))
            out[ids] = None
    return tuple(out)
