"""Sampling against dictionaries and plain Python, parameter by parameter, and in the contract's order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pegainfer.ops.check import suitable_cases
from pegainfer.ops.compose import run_reference
from pegainfer.ops.sample import (
    ADJUST_LOGITS,
    APPEND_TOKENS,
    SAMPLE,
    SAMPLE_TOKENS,
    STATUS_NOT_FINITE,
    STATUS_NOTHING_LEFT,
    STATUS_OK,
    TOKEN_LOGPROBS,
)
from pegainfer.ops.sampler import sampler
from pegainfer.ops.spec import Arrays, Case, OpSpec, Role

NAN, INF = math.nan, math.inf
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def case_of(logits: list[list[float]], **given: Any) -> Case:
    """A sampling case in which nothing is adjusted, one greedy draw a row; `given` overrides by name."""
    x = np.array(logits, np.float32)
    rows, vocab = x.shape
    ints = {
        name: np.zeros(rows, np.int32)
        for name in ("bias_starts", "bias_lens", "banned_starts", "banned_lens")
    }
    ints |= {name: np.zeros(0, np.int32) for name in ("bias_ids", "banned_tokens", "banned_seq_starts")}
    ints |= {"banned_seq_lens": np.zeros(0, np.int32), "mask_rows": np.full(rows, -1, np.int32)}
    ints |= {"slots": np.arange(rows, dtype=np.int32), "history_lens": np.ones(rows, np.int32)}
    ints |= {"prompt_lens": np.ones(rows, np.int32), "history": np.zeros((rows, 8), np.int32)}
    ints |= {"top_k": np.zeros(rows, np.int32), "draws": np.zeros(rows, np.int32)}
    ints |= {"top_lens": np.full(rows, -1, np.int32)}
    floats = {name: np.zeros(rows, np.float32) for name in (*PENALTIES, "temperature", "min_p")}
    floats |= {"repetition_penalty": np.ones(rows, np.float32), "top_p": np.ones(rows, np.float32)}
    floats |= {"bias_values": np.zeros(0, np.float32)}
    arrays: Arrays = {"logits": x, **ints, **floats, "seeds": np.zeros(rows, np.uint64)}
    arrays["masks"] = np.zeros((0, -(-vocab // 32)), np.uint32)
    for name, value in given.items():
        arrays[name] = np.asarray(value, arrays[name].dtype)
    sizes = {"L": rows, "V": vocab, "K": min(vocab, 5), "I": -(-vocab // 32)}
    sizes |= {"J": len(arrays["bias_ids"]), "E": len(arrays["masks"]), "U": len(arrays["banned_tokens"])}
    sizes |= {"O": len(arrays["banned_seq_lens"])} | dict(zip("ZX", arrays["history"].shape, strict=True))
    return Case("", sizes, {"vocab_size": vocab}, arrays)


def run(spec: OpSpec, case: Case) -> dict[str, np.ndarray]:
    """Outputs, and the history as it is afterwards."""
    outs = {
        o.name: np.full([case.sizes[a] for a in o.axes], 99, {"f32": "f4", "i32": "i4"}[o.dtypes[0]])
        for o in spec.operands
        if o.role is Role.OUT
    }
    given = {o.name: case.arrays[o.name].copy() for o in spec.operands if o.role in (Role.IN, Role.STATE)}
    run_reference(spec, case.sizes, {**outs, **given}, {name: case.attrs[name] for name in spec.attrs})
    return outs | {"history": given.get("history", np.empty(0))}


def scores(logits: list[float], **given: Any) -> list[float]:
    """Adjusted scores of one row."""
    out: list[float] = run(ADJUST_LOGITS, case_of([logits], **given))["scores"][0].tolist()
    return out


def test_nothing_asked_changes_nothing() -> None:
    logits = [1.0, -0.0, NAN, INF, -INF, 1e-40, 3e38]
    got = run(ADJUST_LOGITS, case_of([logits]))["scores"]
    assert got.tobytes() == np.array([logits], np.float32).tobytes()


def test_bias_is_added_and_may_forbid() -> None:
    got = scores([1, 2, 3], bias_ids=[2, 0], bias_values=[0.5, -INF], bias_lens=[2])
    assert got == [-INF, 2, 3.5]


def test_biases_that_make_a_score_impossible_are_left_to_be_seen() -> None:
    got = scores([INF, 3e38, 1], bias_ids=[0, 1], bias_values=[-INF, 3e38], bias_lens=[2])
    assert math.isnan(got[0]) and got[1:] == [INF, 1]


def test_mask_keeps_set_bits_little_end_first() -> None:
    words = [[1 << 0 | 1 << 31, 1 << 1]]
    got = run(ADJUST_LOGITS, case_of([[1.0] * 40], masks=words, mask_rows=[0]))["scores"][0]
    assert np.flatnonzero(got == 1).tolist() == [0, 31, 33]
    assert (np.delete(got, [0, 31, 33]) == -INF).all()


def test_mask_and_ban_leave_what_is_wrong_to_be_seen() -> None:
    got = scores([NAN, INF, 1], masks=[[0]], mask_rows=[0])
    assert math.isnan(got[0]) and got[1:] == [INF, -INF]


@pytest.mark.parametrize(
    ("banned", "history", "forbidden"),
    [
        ([[2]], [5], True),  # one token: in any case
        ([[5, 2]], [1, 5], True),
        ([[5, 2]], [5, 1], False),  # not at the end
        ([[1, 5, 2]], [1, 5], True),  # the whole history begins it
        ([[0, 1, 5, 2]], [1, 5], False),  # longer than what is known
        ([[5, 3], [5, 2]], [5], True),
        ([[5, 3]], [5], False),
    ],
)
def test_sequences_that_must_not_be_completed(
    banned: list[list[int]], history: list[int], forbidden: bool
) -> None:
    lens = [len(b) for b in banned]
    got = scores(
        [0.0] * 6,
        banned_tokens=[t for b in banned for t in b], banned_seq_starts=np.cumsum(lens) - lens,
        banned_seq_lens=lens, banned_lens=[len(banned)],
        history=[history + [2] * (8 - len(history))], history_lens=[len(history)],
    )  # fmt: skip
    assert (got[2] == -INF) is forbidden
    assert sum(s == -INF for s in got) == sum(b[:-1] == history[len(history) - len(b) + 1 :] for b in banned)


def test_penalties_count_prompt_and_output_as_the_contract_says() -> None:
    """History: 0 and 1 in the prompt, then 1, 2, 2. Repetition sees all; the others what was generated."""
    known = {"history": [[0, 1, 1, 2, 2, 3, 3, 3]], "history_lens": [5], "prompt_lens": [2]}
    logits = [2.0, -2.0, 2.0, 2.0]
    assert scores(logits, **known, repetition_penalty=[2]) == [1, -4, 1, 2]
    assert scores(logits, **known, presence_penalty=[0.5]) == [2, -2.5, 1.5, 2]
    assert scores(logits, **known, frequency_penalty=[0.5]) == [2, -2.5, 1, 2]
    together = scores(
        logits, **known, repetition_penalty=[2], frequency_penalty=[0.5], presence_penalty=[0.25]
    )
    assert together == [1, -4.75, -0.25, 2]


def test_bias_comes_before_penalties_and_logits_stay_as_they_are() -> None:
    case = case_of([[-1.0, 0.0]], bias_ids=[0], bias_values=[3.0], bias_lens=[1], repetition_penalty=[2])
    assert run(ADJUST_LOGITS, case)["scores"].tolist() == [[1.0, 0.0]], "a positive sum is divided"
    assert case.arrays["logits"].tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("case", suitable_cases(ADJUST_LOGITS, 8), ids=lambda c: c.label)
def test_adjustments_by_dictionary(case: Case) -> None:
    """Each row by plain Python over dictionaries, rounding to float32 after every operation."""
    a, f = case.arrays, np.float32
    got = run(ADJUST_LOGITS, case)["scores"]
    for row, logits in enumerate(a["logits"]):
        s = dict(enumerate(logits[: case.attrs["vocab_size"]]))
        for i in range(a["bias_lens"][row]):
            at = a["bias_starts"][row] + i
            s[int(a["bias_ids"][at])] += a["bias_values"][at]
        seen = a["history"][a["slots"][row], : a["history_lens"][row]].tolist()
        gone = set()
        if (mask := a["mask_rows"][row]) >= 0:
            gone = {v for v in s if not a["masks"][mask, v // 32] >> (v % 32) & 1}
        for o in range(a["banned_starts"][row], a["banned_starts"][row] + a["banned_lens"][row]):
            first = a["banned_seq_starts"][o]
            *prefix, last = a["banned_tokens"][first : first + a["banned_seq_lens"][o]].tolist()
            if seen[max(0, len(seen) - len(prefix)) :] == prefix:
                gone.add(last)
        for v in gone:
            s[v] = s[v] if np.isnan(s[v]) or s[v] == INF else f(-INF)
        output = seen[a["prompt_lens"][row] :]
        with np.errstate(all="ignore"):
            for v in set(seen):
                s[v] = (
                    s[v] / a["repetition_penalty"][row] if s[v] > 0 else s[v] * a["repetition_penalty"][row]
                )
            for v in set(output):
                s[v] = s[v] - f(a["frequency_penalty"][row] * f(output.count(v)))
                s[v] = s[v] - a["presence_penalty"][row]
        np.testing.assert_array_equal(got[row, : len(s)], [s[v] for v in range(len(s))])
        assert (got[row, len(s) :] == -INF).all(), "no token has these ids"


def drawn(logits: list[list[float]], **given: Any) -> tuple[list[int], list[int]]:
    case = case_of(logits, **given)
    case.arrays["scores"] = case.arrays["logits"]
    out = run(SAMPLE_TOKENS, case)
    return out["tokens"].tolist(), out["status"].tolist()


def test_greedy_takes_the_lowest_id_of_the_best() -> None:
    tokens, status = drawn([[1, 3, 3, 2], [-0.0, 0.0, -0.0, -1], [-INF, -INF, -5, -INF]])
    assert tokens == [1, 0, 2] and status == [STATUS_OK] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_cannot_be_drawn_fails_alone(temperature: float) -> None:
    rows = [[0, NAN, 1], [0, INF, 1], [-INF] * 3, [NAN, -INF, -INF], [-INF, 7, -INF]]
    tokens, status = drawn(rows, temperature=[temperature] * 5)
    bad = STATUS_NOT_FINITE
    assert status == [bad, bad, STATUS_NOTHING_LEFT, bad, STATUS_OK]
    assert tokens == [0, 0, 0, 0, 1]


def test_cuts_leave_the_best_only() -> None:
    rng = np.random.default_rng(0)
    logits = np.tile(rng.permutation(50) / 10, (4, 1)).tolist()
    cuts = {"top_k": [1, 0, 0, 0], "top_p": [1, 1e-6, 1, 1], "min_p": [0, 0, 1, 0]}
    tokens, _ = drawn(logits, temperature=[5, 5, 5, 1e-9], seeds=[1, 2, 3, 4], **cuts)
    assert tokens == [int(np.argmax(logits[0]))] * 4


def test_draws_depend_on_seed_and_count_alone() -> None:
    logits = np.random.default_rng(1).normal(size=(1, 200)).tolist()
    many = drawn(logits * 6, temperature=[1] * 6, seeds=[7, 7, 8, 7, 8, 2**63], draws=[0, 1, 0, 0, 1, 0])[0]
    alone = [drawn(logits, temperature=[1], seeds=[s], draws=[d])[0][0] for s, d in ((7, 0), (7, 1), (8, 0))]
    assert many[:3] == alone and many[3] == many[0]
    assert len({many[0], many[1], many[2], many[4], many[5]}) > 2


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": [0]},
        {"temperature": [1]},
        {"temperature": [1], "top_k": [3]},
        {"temperature": [1], "top_p": [0.9]},
        {"temperature": [1], "min_p": [0.1]},
        {"temperature": [0], "masks": [[0xFFFFFFFF]], "mask_rows": [0]},
        {"temperature": [0], "bias_ids": [4], "bias_values": [1e30], "bias_lens": [1]},
    ],
    ids=lambda o: " ".join(o),
)
@pytest.mark.parametrize("behind", [1e30, NAN, INF])
def test_ids_without_a_token_are_neither_drawn_nor_counted(options: dict[str, Any], behind: float) -> None:
    """A head of five rows for two tokens."""
    case = case_of([[0.0, math.log(3), behind, behind, behind]], top_lens=[5], seeds=[3], **options)
    case.attrs["vocab_size"] = 2
    out = run(SAMPLE, case)
    assert out["status"].tolist() == [STATUS_OK] and out["tokens"][0] in (0, 1)
    assert out["top_ids"].tolist() == [[1, 0, -1, -1, -1]]
    np.testing.assert_allclose(np.exp(out["top_logprobs"][0, :2]), [0.75, 0.25], rtol=1e-6)


def logprobs(logits: list[list[float]], targets: list[int], wanted: list[int]) -> dict[str, np.ndarray]:
    case = case_of(logits, top_lens=wanted)
    case.arrays["targets"] = np.array(targets, np.int32)
    return run(TOKEN_LOGPROBS, case)


def test_logprobs_of_known_probabilities() -> None:
    p = [0.1, 0.2, 0.3, 0.4]
    out = logprobs([[math.log(x) + 50 for x in p]] * 2, [1, 3], [0, 3])
    np.testing.assert_allclose(out["logprobs"], np.log([0.2, 0.4]), rtol=1e-5)
    assert out["ranks"].tolist() == [3, 1]
    assert out["top_ids"].tolist() == [[-1] * 4, [3, 2, 1, -1]]
    np.testing.assert_allclose(out["top_logprobs"][1], [*np.log([0.4, 0.3, 0.2]), 0], rtol=1e-5)


def test_ranks_break_ties_by_id_as_the_list_of_best_does() -> None:
    out = logprobs([[2, 5, 2, 2, -INF]], [3], [4])
    assert out["ranks"].tolist() == [4] and out["top_ids"].tolist() == [[1, 0, 2, 3, -1]]
    out = logprobs([[2, 5, 2, 2, -INF]], [4], [5])
    assert out["logprobs"][0] == -INF and out["ranks"][0] == 5 and out["top_logprobs"][0, 4] == -INF


def test_rows_not_asked_for_or_not_finite() -> None:
    out = logprobs([[NAN, 1], [NAN, 1], [-INF, -INF], [0, INF]], [1, 1, 0, 0], [-1, 2, 2, 2])
    assert out["logprobs"][0] == 0 and np.isnan(out["logprobs"][1:]).all()
    assert (out["ranks"] == 0).all() and (out["top_ids"] == -1).all() and (out["top_logprobs"] == 0).all()


def test_append_puts_tokens_at_the_histories_ends() -> None:
    case = case_of([[0.0]] * 3, history=np.arange(24).reshape(3, 8), slots=[2, 0, 1], history_lens=[3, 8, 0])
    case.arrays["tokens"] = np.array([70, 71, 72], np.int32)
    want = np.arange(24).reshape(3, 8)
    want[2, 3], want[1, 0] = 70, 72
    np.testing.assert_array_equal(run(APPEND_TOKENS, case)["history"], want)


def test_sample_is_the_finer_ops_in_order_with_raw_logprobs() -> None:
    """Bias moves the draw to a token that the raw logits rank last; its logprob is still theirs."""
    case = case_of(
        [[0.0, 3.0, 1.0]], bias_ids=[0], bias_values=[10.0], bias_lens=[1], top_lens=[1],
        history=[[2] * 8], history_lens=[2],
    )  # fmt: skip
    out = run(SAMPLE, case)
    assert out["tokens"].tolist() == [0] and out["ranks"].tolist() == [3] and out["top_ids"][0, 0] == 1
    np.testing.assert_allclose(out["logprobs"], [-math.log(1 + math.exp(3) + math.exp(1))], rtol=1e-6)
    assert out["history"].tolist() == [[2, 2, 0, 2, 2, 2, 2, 2]]


@pytest.mark.parametrize("case", suitable_cases(SAMPLE, 9), ids=lambda c: c.label)
def test_the_coarse_op_equals_its_parts_run_by_hand(case: Case) -> None:
    got = run(SAMPLE, case)
    adjusted = run(ADJUST_LOGITS, case)["scores"]
    parts = run(SAMPLE_TOKENS, Case("", case.sizes, case.attrs, {**case.arrays, "scores": adjusted}))
    after = {**case.arrays, "tokens": parts["tokens"], "targets": parts["tokens"]}
    parts = {
        **run(APPEND_TOKENS, Case("", case.sizes, case.attrs, after)),
        "tokens": parts["tokens"],
        "status": parts["status"],
    }
    parts |= {
        k: v
        for k, v in run(TOKEN_LOGPROBS, Case("", case.sizes, case.attrs, after)).items()
        if k != "history"
    }
    for name, value in got.items():
        np.testing.assert_array_equal(value, parts[name], err_msg=name)


def test_the_sampler_program_has_the_ops_names() -> None:
    program = sampler(columns=104, vocab_size=100, max_slots=4, history_width=9, max_logprobs=20)
    assert [c.spec.name for c in program.calls] == ["sample"]
    assert {t.name for t in program.tensors()} == {o.name for o in SAMPLE.operands}
    lowered = [c.spec.name for c in program.lowered(lambda call: False).calls]
    assert lowered == ["adjust_logits", "sample_tokens", "token_logprobs", "append_tokens"]
