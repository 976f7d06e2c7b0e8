"""What a request becomes: seeds of its continuations, and what the runner is told."""

from __future__ import annotations

import random

from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.admission import derived_seed
from pegainfer.engine.scheduler import Scheduler
from tests.null.engine.driving import driver, ids
from tests.null.engine.harness import EOS, Driver, request


def test_index_0_has_the_requests_seed_and_others_their_own() -> None:
    d = driver()
    d.add(request("r", ids(5), n=3, seed=123, max_tokens=1))
    d.run()
    seeds = [new.seed for plan in d.plans for new in plan.news]
    assert seeds[0] == 123
    assert seeds == [derived_seed(123, i) for i in range(3)]
    assert len(set(seeds)) == 3


def test_a_negative_seed_is_taken_modulo_2_to_the_64() -> None:
    d = driver()
    d.add(request("r", ids(5), seed=-1))
    d.step()
    assert d.plans[0].news[0].seed == 2**64 - 1


def test_missing_seeds_are_drawn_from_the_given_generator() -> None:
    def seeds(generator: int) -> list[int]:
        s = Scheduler(Driver().runner.info, rng=random.Random(generator))
        for name in "ab":
            s.add(GenerateRequest(id=name, prompt=pack_tokens([1, 2])), 0.0)
        plan, _ = s.schedule(0.0)
        assert plan is not None
        return [new.seed for new in plan.news]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 2


def test_what_a_new_slot_says() -> None:
    d = driver()
    d.add(request("r", ids(5), min_tokens=2, stop_token_ids=(4,)))
    d.step()
    (new,) = d.plans[0].news
    assert new.tokens == pack_tokens(ids(5))
    assert (new.num_prompt, new.mask_tokens, new.sampling.min_tokens) == (5, (EOS, 4), 2)


def test_sampling_params_reach_the_runner_unchanged() -> None:
    sampling = SamplingParams(temperature=0.5, top_k=3, logit_bias=((1, 2.0),), seed=1)
    s = Scheduler(Driver().runner.info)
    s.add(GenerateRequest(id="r", prompt=pack_tokens([1, 2]), sampling=sampling), 0.0)
    plan, _ = s.schedule(0.0)
    assert plan is not None and plan.news[0].sampling == sampling
