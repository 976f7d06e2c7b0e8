"""A numeric sampling parameter means the same in every package: its bounds, its default, its operand."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from pegainfer.app.sampling_params import SamplingParams as OfflineParams
from pegainfer.contract.errors import RequestError
from pegainfer.contract.request import NUMBERS, GenerateRequest, Number, SamplingParams, pack_tokens
from pegainfer.contract.step import RunnerInfo
from pegainfer.engine.check import check_request
from pegainfer.engine.config import SchedulerConfig
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.request.fields import GenerateFields, sampling_params
from pegainfer.frontend.http.request.sampling_defaults import CHAT_DEFAULTS
from pegainfer.null.runner import NullRunner
from pegainfer.ops.sample import SAMPLE

DEFAULTS = SamplingParams()
OPERANDS = {o.name: o for o in SAMPLE.operands}


def test_these_parameters_are_numbers() -> None:
    """Those of SamplingParams that are neither counts of tokens nor lists."""
    assert set(NUMBERS) == {
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty",
    }  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_the_sampling_op_has_an_operand_whose_neutral_value_is_the_default(name: str) -> None:
    assert OPERANDS[name].axes == ("L",)
    neutral = (
        0 if name == "temperature" else getattr(DEFAULTS, name)
    )  # the default draws, the neutral is greedy
    assert OPERANDS[name].neutral == neutral


@pytest.mark.parametrize("name", NUMBERS)
def test_the_offline_parameters_have_it_with_the_same_default(name: str) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(OfflineParams)}
    assert defaults[name] == getattr(DEFAULTS, name)
    value = 1 if NUMBERS[name].whole else 0.5
    assert getattr(OfflineParams(**{name: value}).to_engine(lambda text: [1]), name) == value


def over_http(name: str, value: float) -> SamplingParams:
    return sampling_params(
        msgspec.convert({name: value}, GenerateFields), defaults=CHAT_DEFAULTS, config=HttpConfig(),
        vocab_size=100, max_tokens=1, logprobs=None, prompt_logprobs=None, encode=lambda text: [1],
    )  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_http_takes_what_is_within_the_bounds_and_names_what_is_not(name: str) -> None:
    number = NUMBERS[name]
    assert getattr(over_http(name, number.high), name) == number.high
    beyond = [number.high + 1, number.low - 1, *([number.low] if number.above else [])]
    for value in beyond:
        with pytest.raises(ApiError, match=rf"{name}: expected {number.low} [<≤] {name} ≤ {number.high}"):
            over_http(name, value)


@pytest.mark.parametrize("name", NUMBERS)
def test_the_engine_takes_its_own_bounds_and_names_what_is_beyond(name: str) -> None:
    number, info = NUMBERS[name], NullRunner().info
    low, high = number.engine or (number.low, number.high)
    check(info, name, high)
    if not number.above:
        check(info, name, low)
    for value in (high * 2 + 1, low * 2 - 1, *([low] if number.above else [])):
        with pytest.raises(RequestError, match=f"{name} is out of range") as error:
            check(info, name, value)
        assert error.value.param == name


def check(info: RunnerInfo, name: str, value: float) -> None:
    sampling = msgspec.structs.replace(DEFAULTS, max_tokens=1, **{name: value})
    request = GenerateRequest(id="a", prompt=pack_tokens([1]), sampling=sampling)
    check_request(request, info, SchedulerConfig(), 16, 1 << 20)


def test_a_bound_that_is_excluded_is_in_no_request() -> None:
    assert Number("", 0, 1, above=True).in_request(1e-9)
    assert not Number("", 0, 1, above=True).in_request(0)
    assert Number("", 0, 1).in_request(0)
    assert not Number("", 0, 1).in_request(float("nan"))
