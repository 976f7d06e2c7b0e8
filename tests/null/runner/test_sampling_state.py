"""Sampling parameters of slots, staged as the sampling op takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.contract.request import SamplingParams
from pegainfer.contract.step import NewSlot
from pegainfer.runner.sampling_state import SamplingState

VOCAB = 70  # three mask words, the last one partly used


def state(*params: SamplingParams, ends: tuple[int, ...] = ()) -> SamplingState:
    s = SamplingState(len(params), VOCAB, max_logprobs=5)
    for slot, p in enumerate(params):
        s.enter(
            NewSlot(
                slot=slot,
                seq=slot,
                tokens=b"",
                num_prompt=0,
                sampling=p,
                seed=2**64 - 1 - slot,
                mask_tokens=ends,
            )
        )
    return s


def staged(
    s: SamplingState, slots: list[int], draws: int = 0, masks: dict[int, bytes] | None = None
) -> dict[str, Any]:
    return s.stage(np.array(slots), np.full(len(slots), draws, np.int32), masks or {})


def part(inputs: dict[str, Any], name: str, row: int) -> list[Any]:
    """Row `row`'s share of a flat list."""
    start, length = inputs[f"{name}_starts"][row], inputs[f"{name}_lens"][row]
    values = "bias_ids" if name == "bias" else "banned_seq_lens"
    return list(range(len(inputs[values])))[start : start + length]


def banned(inputs: dict[str, Any], row: int) -> list[list[int]]:
    starts, lens, tokens = (inputs[f"banned_{n}"] for n in ("seq_starts", "seq_lens", "tokens"))
    return [tokens[starts[o] : starts[o] + lens[o]].tolist() for o in part(inputs, "banned", row)]


def mask_ids(inputs: dict[str, Any], row: int) -> list[int] | None:
    at = inputs["mask_rows"][row]
    if at < 0:
        return None
    bits = np.unpackbits(inputs["masks"][at].astype("<u4").view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


def test_plain_rows_have_empty_lists() -> None:
    inputs = staged(
        state(SamplingParams(), SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)), [1, 0]
    )
    assert inputs["temperature"].tolist() == [0.5, 1.0]
    assert inputs["top_k"].tolist() == [3, 0]
    np.testing.assert_allclose(inputs["top_p"], [0.9, 1.0], rtol=1e-6)
    np.testing.assert_allclose(inputs["min_p"], [0.1, 0.0], rtol=1e-6)
    assert inputs["seeds"].tolist() == [2**64 - 2, 2**64 - 1]
    assert inputs["top_lens"].tolist() == [-1, -1]
    assert inputs["masks"].shape == (0, 3)
    assert inputs["mask_rows"].tolist() == [-1, -1]
    assert all(len(inputs[n]) == 0 for n in ("bias_ids", "bias_values", "banned_tokens", "banned_seq_lens"))
    assert inputs["repetition_penalty"].tolist() == [1.0, 1.0]


def test_empty_lists_are_kept_while_the_rows_are_as_many() -> None:
    s = state(SamplingParams(), SamplingParams(), SamplingParams(logit_bias=((1, 1.0),)))
    mask = np.array([6, 0, 0], "<u4").tobytes()
    assert part(staged(s, [2]), "bias", 0) == [0]
    s.leave(2)
    first, again = staged(s, [0, 1], draws=3), staged(s, [1, 0], draws=4)
    assert again["bias_lens"] is first["bias_lens"] and again["draws"].tolist() == [4, 4]
    assert mask_ids(staged(s, [0, 1], masks={1: mask}), 1) == [1, 2]
    for slots in ([0, 1], [0], [0, 1, 2]):
        inputs = staged(s, slots)
        assert inputs["mask_rows"].tolist() == [-1] * len(slots) and inputs["masks"].shape == (0, 3)
        for name in ("bias_lens", "bias_starts", "banned_lens", "banned_starts"):
            assert inputs[name].tolist() == [0] * len(slots)


def test_each_parameter_has_its_own_name() -> None:
    p = SamplingParams(repetition_penalty=1.25, frequency_penalty=0.5, presence_penalty=-0.5, logprobs=9)
    inputs = staged(state(p), [0])
    assert inputs["repetition_penalty"].tolist() == [1.25]
    assert inputs["frequency_penalty"].tolist() == [0.5]
    assert inputs["presence_penalty"].tolist() == [-0.5]
    assert inputs["top_lens"].tolist() == [5]  # as many as the runner can give


def test_biases_lie_end_to_end() -> None:
    s = state(
        SamplingParams(logit_bias=((4, 1.5), (2, -1.0))),
        SamplingParams(),
        SamplingParams(logit_bias=((69, 3.0), (70, 1.0))),
    )
    inputs = staged(s, [2, 1, 0])
    assert inputs["bias_ids"].tolist() == [69, 4, 2]  # 70 is outside the vocabulary
    assert inputs["bias_values"].tolist() == [3.0, 1.5, -1.0]
    assert [part(inputs, "bias", row) for row in range(3)] == [[0], [], [1, 2]]


def test_ends_are_banned_until_min_tokens() -> None:
    s = state(SamplingParams(min_tokens=2), SamplingParams(bad_words=((7,), (8, 9), (8, 99))), ends=(2, 3))
    inputs = staged(s, [0, 1], draws=1)
    assert banned(inputs, 0) == [[2], [3]]
    assert banned(inputs, 1) == [[7], [8, 9]]
    assert banned(staged(s, [0, 1], draws=2), 0) == []


def test_bad_words_stand_before_ends_row_by_row() -> None:
    words = SamplingParams(min_tokens=2, bad_words=((7, 8, 9), (4,)))
    s = state(words, SamplingParams(), words, ends=(2, 3))
    inputs = staged(s, [2, 1, 0], draws=1)
    assert [banned(inputs, row) for row in range(3)] == [
        [[7, 8, 9], [4], [2], [3]],
        [],
        [[7, 8, 9], [4], [2], [3]],
    ]
    assert all(inputs[f"banned_{n}"].dtype == np.int32 for n in ("tokens", "seq_starts", "seq_lens", "lens"))


def test_masks_and_allowed_tokens_both_hold() -> None:
    s = state(
        SamplingParams(allowed_token_ids=(1, 40, 69, 70)),
        SamplingParams(),
        SamplingParams(allowed_token_ids=()),
    )
    grammar = np.array([0b110, 0, 1 << 5], "<u4").tobytes()  # tokens 1, 2, 69
    inputs = staged(s, [0, 1, 2], masks={0: grammar})
    assert [mask_ids(inputs, row) for row in range(3)] == [[1, 69], None, []]
    inputs = staged(s, [0, 1], masks={1: grammar})
    assert [mask_ids(inputs, row) for row in range(2)] == [[1, 40, 69], [1, 2, 69]]


def test_a_slot_forgets_its_last_owner() -> None:
    s = state(SamplingParams(logit_bias=((1, 1.0),)))
    s.leave(0)
    s.enter(NewSlot(slot=0, seq=9, tokens=b"", num_prompt=0, sampling=SamplingParams(), seed=1))
    assert len(staged(s, [0])["bias_ids"]) == 0
