"""One temperature decides what is greedy: HTTP, the offline API, the null model and all samplers agree."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from pegainfer.app.sampling_params import SamplingParams as OfflineParams
from pegainfer.contract.request import GREEDY_BELOW, SamplingParams
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.request.fields import GenerateFields, sampling_params
from pegainfer.frontend.http.request.sampling_defaults import COMPLETION_DEFAULTS
from pegainfer.null.model import NullModel
from pegainfer.ops import draw

KERNELS = Path(__file__).parents[3] / "src" / "pegainfer" / "kernels"
JUST_BELOW = math.nextafter(GREEDY_BELOW, 0.0)


def constant(path: str, name: str) -> float:
    """The value of a C++ constant that is written as a float literal or as 1.0f / (1 << n)."""
    text = (KERNELS / path).read_text()
    found = re.search(rf"constexpr float {name} = ([^;]+);", text)
    assert found is not None
    value = found[1].strip()
    if shift := re.fullmatch(r"1\.0f / \(1 << (\d+)\)", value):
        return 2.0 ** -int(shift[1])
    return float(value.removesuffix("f"))


def test_every_sampler_has_the_contracts_threshold() -> None:
    assert draw.GREEDY_BELOW == GREEDY_BELOW
    assert constant("cpu/csrc/op_sample.cpp", "kGreedyBelow") == GREEDY_BELOW
    assert constant("cuda/common/sample/sample.cuh", "GREEDY_BELOW") == GREEDY_BELOW


def http_temperature(temperature: float) -> float:
    """What a request's temperature becomes on its way to the engine."""
    fields = GenerateFields(temperature=temperature)
    params = sampling_params(
        fields,
        defaults=COMPLETION_DEFAULTS,
        config=HttpConfig(),
        vocab_size=100,
        max_tokens=1,
        logprobs=None,
        prompt_logprobs=None,
        encode=lambda text: [1],
    )
    return params.temperature


@pytest.mark.parametrize(
    ("temperature", "kept"), [(JUST_BELOW, 0.0), (GREEDY_BELOW, GREEDY_BELOW), (5e-6, 5e-6)]
)
def test_http_and_the_offline_api_agree(temperature: float, kept: float) -> None:
    assert http_temperature(temperature) == kept
    assert OfflineParams(temperature=temperature).to_engine(lambda text: [1]).temperature == kept


def test_the_offline_api_leaves_a_negative_temperature_to_the_engines_check() -> None:
    assert OfflineParams(temperature=-1.0).to_engine(lambda text: [1]).temperature == -1.0


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (JUST_BELOW, True), (GREEDY_BELOW, False)])
def test_the_null_model_ignores_the_seed_where_it_is_greedy(temperature: float, greedy: bool) -> None:
    sampling = SamplingParams(temperature=temperature)
    first, second = (NullModel().draw([1, 2], 12345, 2, sampling, seed) for seed in (1, 3))
    assert (first == second) == greedy
