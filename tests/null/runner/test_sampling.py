"""What a step's sampling is given: kept from the step before where the batch goes on, and always right."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import KVSpec, NewSlot, PageGroup, Row, RunnerInfo, SlotBlocks, StepPlan
from pegainfer.runner.sampling import SamplerCalls, sampler_call
from pegainfer.runner.slots import Slots
from pegainfer.runner.staging import Staging

SLOTS, LENGTH, BLOCK = 6, 64, 4
INFO = RunnerInfo(
    kv=KVSpec((PageGroup(name="kv", block_size=BLOCK, bytes_per_block=1),)),
    num_blocks=(SLOTS * LENGTH // BLOCK,), max_slots=SLOTS, max_tokens=32, max_model_len=LENGTH,
    vocab_size=100,
)  # fmt: skip
INPUTS = {
    "token_ids", "positions", "query_starts", "query_lens", "context_lens", "logit_rows", "kv.places",
    "kv.block_table",
}  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"top_k": 5}, {"logprobs": 2}, {"logit_bias": ((3, 1.5),)},
    {"bad_words": ((1, 2),)}, {"allowed_token_ids": (1, 2, 3)}, {"repetition_penalty": 1.5},
)  # fmt: skip


def new(slot: int, seq: int, tokens: int, **sampling: Any) -> NewSlot:
    return NewSlot(
        slot=slot, seq=seq, tokens=pack_tokens([seq % 100] * tokens), num_prompt=tokens,
        sampling=SamplingParams(**sampling), seed=seq,
    )  # fmt: skip


def own_blocks(slot: int) -> SlotBlocks:
    """All that a slot could need: no two share one."""
    per = LENGTH // BLOCK
    return SlotBlocks(slot, 0, tuple(range(slot * per, (slot + 1) * per)))


def test_kept_inputs_are_those_made_anew() -> None:
    """Random batches that mostly go on: sequences come and go, change slots' options, meet masks."""
    rng = random.Random(3)
    slots = Slots(INFO, max_logprobs=5)
    staging, calls = Staging(slots, INFO, INPUTS), SamplerCalls(slots)
    running: set[int] = set()
    went_on, last = 0, None
    for step in range(1, 600):
        frees = [s for s in running if slots.known[s] > LENGTH - 2 or rng.random() < 0.02]
        running -= set(frees)
        news: list[NewSlot] = []
        if len(running) < SLOTS and rng.random() < (0.1 if running else 1.0):
            slot = rng.choice([s for s in range(SLOTS) if s not in running])
            news = [new(slot, step, rng.randint(1, 6), **rng.choice(OPTIONS))]
            running.add(slot)
        fresh = {n.slot: len(np.frombuffer(n.tokens, "<i4")) for n in news}
        rows = [
            Row(s, 0, fresh[s], True) if s in fresh else Row(s, int(slots.known[s]) - 1, 1, True)
            for s in sorted(running)
        ]
        plan = StepPlan(
            step=step, frees=tuple(frees), news=tuple(news), blocks=tuple(own_blocks(n.slot) for n in news),
            rows=tuple(rows),
        )  # fmt: skip
        slots.apply(plan)
        staged = staging.rows(plan)
        anew = Staging(slots, INFO, INPUTS)
        inputs, wanted = staging.inputs(staged), anew.inputs(anew.rows(plan))
        reach = -(-max(r.start + r.count for r in rows) // BLOCK)
        for name, array in wanted.items():
            cut = (slice(None), slice(reach)) if name == "kv.block_table" else slice(None)
            np.testing.assert_array_equal(inputs[name][cut], array[cut], err_msg=name)

        masks = {row: rng.randbytes(16) for row in range(len(rows)) if rng.random() < 0.3}
        masks = masks if step % 40 < 20 else {}
        call, want = calls.call(staged, masks), sampler_call(slots, staged, masks)
        assert call.env == want.env
        assert call.inputs.keys() == want.inputs.keys()
        for name, array in want.inputs.items():
            assert call.inputs[name].dtype == array.dtype, name
            np.testing.assert_array_equal(call.inputs[name], array, err_msg=name)
        went_on += call is last
        last = call
        for s in running:
            slots.history[s, slots.known[s]] = rng.randrange(100)
        slots.advance(np.array(sorted(running)))
    assert went_on > 100  # what has been kept was tried
