"""The runner's contract on a tiny model and NumPy references: order, chunks, follows, copies, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import BlockCopy, NewSlot, Row, RunnerInfo, SlotBlocks, StepPlan, StepResult
from pegainfer.kv.device.layout import kv_spec
from pegainfer.models.llama.engine import from_hf
from pegainfer.ops.backend import ReferenceBackend
from pegainfer.runner.host import HostRunner
from pegainfer.runner.program import Formats
from pegainfer.runtime.weights.safetensors import open_safetensors
from tests.support.tinymodel import MODELS, VOCAB, write_checkpoint

PROMPT = [5, 17, 3, 99, 42, 8, 120, 64, 7]
GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Hands plans to a runner and counts steps."""

    def __init__(self, runner: HostRunner) -> None:
        self.runner = runner
        self.step = 0

    def start(self, masks: dict[int, bytes] | None = None, **parts: Any) -> Any:
        self.step += 1
        return self.runner.sample(self.runner.forward(StepPlan(step=self.step, **parts)), masks)

    def run(self, masks: dict[int, bytes] | None = None, **parts: Any) -> StepResult:
        result: StepResult = self.start(masks, **parts).wait()
        return result


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    model = MODELS["tied_f32"]
    loaded = from_hf(model.hf_config(), "config.json", open_safetensors(write_checkpoint(model, tmp_path)))
    groups = loaded.groups(4, Formats())
    info = RunnerInfo(
        kv=kv_spec(groups),
        num_blocks=(32,),
        max_slots=4,
        max_tokens=32,
        max_model_len=40,
        vocab_size=loaded.vocab_size,
    )
    backend = ReferenceBackend(loaded.tensors(info.max_model_len))
    runner = loaded.build(info, groups, backend, steps=Formats(), max_logprobs=20)
    assert isinstance(runner, HostRunner)
    yield Driver(runner)
    runner.close()


def new(
    slot: int, tokens: list[int], sampling: SamplingParams = GREEDY, num_prompt: int | None = None
) -> NewSlot:
    return NewSlot(
        slot=slot,
        seq=slot,
        tokens=pack_tokens(tokens),
        num_prompt=num_prompt or len(tokens),
        sampling=sampling,
        seed=11,
    )


def plain(driver: Driver, count: int, sampling: SamplingParams = GREEDY, slot: int = 0) -> list[int]:
    """The prompt in one step, then `count` - 1 decodes; the slot is freed."""
    blocks = (SlotBlocks(slot, 0, tuple(range(6))),)
    r = driver.run(
        news=(new(slot, PROMPT, sampling),), blocks=blocks, rows=(Row(slot, 0, len(PROMPT), True),)
    )
    tokens = [r.tokens[0][0]]
    for i in range(count - 1):
        r = driver.run(rows=(Row(slot, len(PROMPT) + i, 1, True),))
        tokens.append(r.tokens[0][0])
    driver.run(frees=(slot,))
    return tokens


def test_chunks_and_scattered_blocks_give_the_same_tokens(driver: Driver) -> None:
    wanted = plain(driver, 5)
    assert len(set(wanted)) > 1
    driver.run(news=(new(2, PROMPT),), blocks=(SlotBlocks(2, 0, (20,)),), rows=(Row(2, 0, 4, False),))
    driver.run(blocks=(SlotBlocks(2, 0, (9,)),), rows=(Row(2, 4, 3, False),))
    got = driver.run(blocks=(SlotBlocks(2, 0, (31, 7)),), rows=(Row(2, 7, 2, True),)).tokens[0]
    for i in range(4):
        got += driver.run(rows=(Row(2, len(PROMPT) + i, 1, True),)).tokens[0]
    assert list(got) == wanted


def test_two_plans_in_flight_follow_each_other(driver: Driver) -> None:
    wanted = plain(driver, 5)
    blocks = (SlotBlocks(1, 0, (3, 4, 5, 6)),)
    pending = [driver.start(news=(new(1, PROMPT),), blocks=blocks, rows=(Row(1, 0, 9, True),))]
    pending += [driver.start(rows=(Row(1, 9 + i, 1, True, True),)) for i in range(4)]
    assert [p.wait().tokens[0][0] for p in pending] == wanted


def test_sequences_in_one_step_do_not_meet(driver: Driver) -> None:
    wanted = plain(driver, 4)
    other = [1, 2, 3]
    driver.run(news=(new(3, other),), blocks=(SlotBlocks(3, 0, (30, 29)),), rows=(Row(3, 0, 3, True),))
    r = driver.run(
        news=(new(0, PROMPT),),
        blocks=(SlotBlocks(0, 0, (1, 2, 3, 4)),),
        rows=(Row(3, 3, 1, True), Row(0, 0, 9, True)),
    )
    got = [r.tokens[1][0]]
    for i in range(3):
        r = driver.run(rows=(Row(0, 9 + i, 1, True), Row(3, 4 + i, 1, True)))
        got.append(r.tokens[0][0])
    assert got == wanted


def test_a_preempted_sequence_goes_on_alike(driver: Driver) -> None:
    """Recomputed with what it had generated, seeds count on from there."""
    sampling = SamplingParams(temperature=1.0, presence_penalty=0.5)
    wanted = plain(driver, 6, sampling)
    again = new(1, PROMPT + wanted[:3], sampling, num_prompt=len(PROMPT))
    r = driver.run(news=(again,), blocks=(SlotBlocks(1, 0, (8, 9, 10, 11)),), rows=(Row(1, 0, 12, True),))
    got = [r.tokens[0][0]]
    for i in range(2):
        got.append(driver.run(rows=(Row(1, 12 + i, 1, True),)).tokens[0][0])
    assert got == wanted[3:]


def test_a_fork_copies_its_last_block(driver: Driver) -> None:
    """Slot 1 shares full blocks with slot 0 and gets a copy of the partial one; then each has its own."""
    wanted = plain(driver, 5)
    driver.run(news=(new(0, PROMPT),), blocks=(SlotBlocks(0, 0, (1, 2, 3)),), rows=(Row(0, 0, 8, False),))
    r = driver.run(rows=(Row(0, 8, 1, True),))
    first = r.tokens[0][0]
    r = driver.run(
        news=(new(1, [*PROMPT, first], num_prompt=9),),
        blocks=(SlotBlocks(1, 0, (1, 2, 4)),),
        copies=(BlockCopy(0, 3, 4),),
        rows=(Row(0, 9, 1, True), Row(1, 9, 1, True)),
    )
    assert r.tokens[0] == r.tokens[1]
    got = [[first, t[0]] for t in r.tokens]
    for i in range(3):
        r = driver.run(blocks=(SlotBlocks(1, 0, (5,)),) if i == 2 else (), rows=(Row(1, 10 + i, 1, True),))
        got[1].append(r.tokens[0][0])
    assert got[1] == wanted


def test_logprobs_of_drawn_and_prompt_tokens(driver: Driver) -> None:
    """Prompt entries of a chunk: one for each known token after its positions; the last one is drawn."""
    sampling = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=3)
    blocks = (SlotBlocks(0, 0, (1, 2, 3)),)
    a = driver.run(news=(new(0, PROMPT, sampling),), blocks=blocks, rows=(Row(0, 0, 6, False),))
    b = driver.run(rows=(Row(0, 6, 3, True),))
    assert [e.token for e in a.prompt_logprobs[0]] == PROMPT[1:7]
    assert [e.token for e in b.prompt_logprobs[0]] == PROMPT[7:9]
    assert a.logprobs == {}
    (drawn,) = b.logprobs[0]
    assert (drawn.token,) == b.tokens[0]
    assert drawn.rank == 1
    assert drawn.top[0] == (drawn.token, drawn.logprob)
    assert len(drawn.top) == 2
    for entry in a.prompt_logprobs[0] + b.prompt_logprobs[0]:
        assert len(entry.top) == 3
        assert entry.rank <= 3 or entry.logprob <= entry.top[2][1]
        assert entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1]
    driver.run(frees=(0,))
    # Known tokens after the prompt (a sequence that was preempted) are no prompt tokens.
    again = new(0, [*PROMPT, 4, 4], sampling, num_prompt=9)
    r = driver.run(news=(again,), blocks=blocks, rows=(Row(0, 0, 11, True),))
    assert [e.token for e in r.prompt_logprobs[0]] == PROMPT[1:]
    for ours, before in zip(r.prompt_logprobs[0], a.prompt_logprobs[0] + b.prompt_logprobs[0], strict=True):
        assert ours.logprob == pytest.approx(before.logprob, abs=1e-5)


def test_masks_name_rows_of_the_plan(driver: Driver) -> None:
    only = np.zeros(-(-VOCAB // 32), "<u4")
    only[77 // 32] = 1 << 77 % 32
    blocks = (SlotBlocks(0, 0, (1, 2, 3)), SlotBlocks(1, 0, (4, 5, 6)), SlotBlocks(2, 0, (7, 8, 9)))
    r = driver.run(
        masks={2: only.tobytes()},
        news=(new(0, PROMPT), new(1, PROMPT), new(2, PROMPT)),
        blocks=blocks,
        rows=(Row(0, 0, 9, False), Row(1, 0, 9, True), Row(2, 0, 9, True)),
    )
    assert r.tokens[0] == ()
    assert r.tokens[1] != (77,)
    assert r.tokens[2] == (77,)


def test_a_row_that_cannot_be_drawn_fails_alone(driver: Driver) -> None:
    nothing = SamplingParams(temperature=0.0, allowed_token_ids=(4,), bad_words=((4,),))
    infinite = SamplingParams(temperature=0.0, logit_bias=((3, float("inf")),))
    blocks = tuple(SlotBlocks(s, 0, (3 * s, 3 * s + 1, 3 * s + 2)) for s in range(3))
    r = driver.run(
        news=(new(0, PROMPT, nothing), new(1, PROMPT), new(2, PROMPT, infinite)),
        blocks=blocks,
        rows=tuple(Row(s, 0, 9, True) for s in range(3)),
    )
    assert set(r.errors) == {0, 2}
    assert "leave no token" in r.errors[0]
    assert r.error_kinds == {0: "RequestError"}  # logits that are not finite are a fault of ours
    assert "not finite" in r.errors[2]
    assert (r.tokens[0], r.tokens[2]) == ((), ())
    wanted = r.tokens[1]
    # A plan made before the failure was known still follows; the healthy row goes on as if alone.
    r = driver.run(rows=tuple(Row(s, 9, 1, True, True) for s in range(3)))
    driver.run(frees=(0, 1, 2))
    assert list(wanted + r.tokens[1]) == plain(driver, 2)


def test_steps_without_rows_do_nothing(driver: Driver) -> None:
    r = driver.run()
    assert (r.tokens, r.errors, r.logprobs) == ((), {}, {})


def test_a_broken_plan_fails_its_own_step(driver: Driver) -> None:
    pending = driver.start(rows=(Row(0, 0, 3, True),))
    with pytest.raises(InvariantError, match="impossible rows"):
        pending.wait()


def test_logits_that_were_overwritten_are_not_sampled(driver: Driver) -> None:
    blocks = (SlotBlocks(0, 0, (1, 2, 3)),)
    one = driver.runner.forward(
        StepPlan(step=1, news=(new(0, PROMPT),), blocks=blocks, rows=(Row(0, 0, 9, True),))
    )
    driver.runner.forward(StepPlan(step=2, rows=(Row(0, 8, 1, True),)))
    with pytest.raises(InvariantError, match="step 1 is sampled after step 2"):
        driver.runner.sample(one).wait()
