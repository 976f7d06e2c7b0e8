"""Prices of steps: at measured sizes, between them, without a measurement, on other cards, mixed steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

import msgspec
import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.measure import ledger
from pegainfer.measure.cards import DATA_SHEETS, PricedDevice, priced_card, priced_cpu
from pegainfer.measure.ledger import FORWARD, Row
from pegainfer.measure.prices import SAMPLING, PriceList, StepWork
from pegainfer.ops.program import Program
from tests.support.launch_lists import Case, recorded


@cache
def programs() -> tuple[Program, Program]:
    """The forward pass and the sampler of Qwen3-4B's sizes."""
    return recorded(Case("Qwen3-4B", layers=36)), recorded(Case("Qwen3-4B", program="sampler"))


@cache
def h100() -> PricedDevice:
    return priced_card("H100", ledger.newest(ledger.read()))


def price_list(device: PricedDevice) -> PriceList:
    return device.prices(*programs(), "greedy")


def us_by_op(prices: PriceList, work: StepWork) -> dict[str, float]:
    return {op.op: op.us for op in prices.ops(work)}


def forward_us(prices: PriceList, work: StepWork) -> float:
    return sum(op.us for op in prices.ops(work) if op.op not in SAMPLING)


def test_ops_of_a_step_add_up_to_its_seconds() -> None:
    prices = price_list(h100())
    for work in (
        StepWork(1, 1024, (), 1),
        StepWork(64, 70_000, (), 64),
        StepWork(31, 33_000, ((0, 1024), (512, 64)), 32),
    ):
        assert sum(op.us for op in prices.ops(work)) == pytest.approx(prices.seconds(work) * 1e6)


def passes(rows: Iterable[Row]) -> dict[str, tuple[StepWork, float]]:
    """Measured forward passes as works, with their microseconds."""
    found = {}
    for row in rows:
        if row.op == FORWARD:
            tokens, rows_, context = (row.shape[a] for a in "TRC")
            decode = tokens == rows_
            chunks = () if decode else ((context - tokens, tokens),)
            work = StepWork(rows_, context, (), rows_) if decode else StepWork(0, 0, chunks, 1)
            found[f"T={tokens} R={rows_} C={context}"] = work, row.us
    return found


@pytest.mark.parametrize("name", passes(h100().rows))
def test_prices_of_ops_compose_to_a_measured_pass(name: str) -> None:
    work, us = passes(h100().rows)[name]
    # Decoding composes within what runs differ by; what a short prompt's ops overlap is known less well.
    assert forward_us(price_list(h100()), work) == pytest.approx(us, rel=0.03 if not work.chunks else 0.12)


def test_a_measured_size_costs_what_was_measured_and_says_so() -> None:
    rows = [r for r in h100().rows if r.op == "gate_up_swiglu" and r.shape["T"] == 64]
    found = {op.op: op for op in price_list(h100()).ops(StepWork(64, 65_536, (), 64))}
    gate = found["gate_up_swiglu 2560→9728"]
    assert (gate.us, gate.calls, gate.origin) == (pytest.approx(36 * rows[0].cost_us), 36, "measured")
    assert gate.floor_us == pytest.approx(36 * rows[0].floor_us, rel=0.01)


def test_between_two_sizes_a_price_grows_in_proportion() -> None:
    costs = {r.shape["L"]: r.cost_us for r in h100().rows if r.op == "lm_head"}
    found = {op.op: op for op in price_list(h100()).ops(StepWork(96, 98_304, (), 96))}
    head = found["lm_head 2560→151936"]
    assert head.us == pytest.approx((costs[64] + costs[128]) / 2)
    assert head.origin == "interpolated"


def test_passes_of_another_model_say_nothing_of_this_one() -> None:
    forward, sampler = recorded(Case("Qwen3-8B", layers=36)), programs()[1]
    one = StepWork(1, 1024, (), 1)
    found = h100().prices(forward, sampler, "greedy").ops(one)
    gate = next(op for op in found if op.op.startswith("gate_up_swiglu"))
    assert gate.origin == "roofline"
    assert gate.us == gate.floor_us  # no ratio of a measured pass is on it
    qwen3_4b = {op.op: op for op in price_list(h100()).ops(one)}
    assert (
        qwen3_4b["gate_up_swiglu 2560→9728"].us < 36 * 37
    )  # its pass is one launch: less than its ops alone


def test_an_op_without_a_measurement_takes_its_floor_and_is_named() -> None:
    device = h100()
    rows = tuple(r for r in device.rows if r.op != "gate_up_swiglu")
    prices = price_list(PricedDevice(device.name, True, rows, device.roofline, "measured", device.memory, ()))
    assert [(gap.op, gap.calls) for gap in prices.gaps()] == [("gate_up_swiglu 2560→9728", 36)]
    found = {op.op: op for op in prices.ops(StepWork(8, 8192, (), 8))}
    gate = found["gate_up_swiglu 2560→9728"]
    assert gate.origin == "roofline"
    # Two matrices of 9,728 x 2,560 in bf16 for each of 36 layers, at the measured bandwidth.
    moved = 36 * 2 * 9728 * 2560 * 2
    assert gate.us == pytest.approx(moved / device.roofline.read_gb_s / 1e3, rel=0.01)
    assert not price_list(device).gaps()


def test_a_mixed_step_costs_its_parts_of_attention_and_its_tokens_once() -> None:
    prices = price_list(h100())
    decodes, chunk = StepWork(8, 8192, (), 8), StepWork(0, 0, ((0, 1016),), 1)
    mixed = StepWork(8, 8192, ((0, 1016),), 9)
    parts = us_by_op(prices, mixed)
    alone = us_by_op(prices, decodes)["attention"] + us_by_op(prices, chunk)["attention"]
    assert parts["attention"] == pytest.approx(alone)
    whole = us_by_op(prices, StepWork(0, 0, ((0, 1024),), 1))
    assert parts["gate_up_swiglu 2560→9728"] == pytest.approx(whole["gate_up_swiglu 2560→9728"])


def test_padding_is_paid_for() -> None:
    padded = h100().prices(*programs(), "greedy", lambda tokens, rows, decode: (128, 128))
    plain = price_list(h100())
    op = "gate_up_swiglu 2560→9728"
    short, long = StepWork(100, 102_400, (), 100), StepWork(128, 131_072, (), 128)
    assert us_by_op(padded, short)[op] == us_by_op(plain, long)[op] > us_by_op(plain, short)[op]


def test_more_context_never_costs_less() -> None:
    prices = price_list(h100())
    times = [prices.seconds(StepWork(32, 32 * context, (), 32)) for context in range(256, 16_384, 256)]
    assert all(b >= a * 0.995 for a, b in pairwise(times))
    assert times[-1] > 2 * times[0]


def test_a_card_that_was_not_measured_is_scaled_by_its_data_sheet() -> None:
    like, other = h100(), priced_card("H200", ledger.newest(ledger.read()))
    assert other.known == "scaled"
    assert "not measured" in other.notes[0]
    ratio = DATA_SHEETS["H200"].gb_s / DATA_SHEETS["H100"].gb_s
    assert other.roofline.read_gb_s == pytest.approx(like.roofline.read_gb_s * ratio)
    bound_by_memory = StepWork(1, 1024, (), 1)
    here, there = price_list(like).seconds(bound_by_memory), price_list(other).seconds(bound_by_memory)
    assert there == pytest.approx(here / ratio, rel=0.02)
    assert {op.origin for op in price_list(other).ops(bound_by_memory)} == {"scaled"}


def test_rows_of_another_arithmetic_or_instruction_set_are_no_price() -> None:
    cpu = priced_cpu(ledger.newest(ledger.read()))
    newer = [
        msgspec.structs.replace(r, variant=r.variant.replace("avx512", "avx2"), date="2999-01-01T00:00:00Z")
        for r in cpu.rows[:4]
    ]
    assert len(priced_cpu([*cpu.rows, *newer]).rows) == 4
    other = [msgspec.structs.replace(r, arithmetic="f32") for r in h100().rows if r.op == "lm_head"]
    device = h100()
    rows = (*(r for r in device.rows if r.op != "lm_head"), *other)
    prices = price_list(PricedDevice(device.name, True, rows, device.roofline, "measured", device.memory, ()))
    assert [gap.op for gap in prices.gaps()] == ["lm_head 2560→151936"]


def test_prices_of_changed_sources_are_named() -> None:
    cpu = priced_cpu(ledger.newest(ledger.read()))
    rows = [msgspec.structs.replace(r, source="gone") for r in cpu.rows[:3]]
    (note,) = priced_cpu(rows).notes
    assert note.startswith("stale prices: 3 rows of ")
    assert "sources changed after commit" in note


def test_errors_of_interpolation_are_those_of_left_out_measurements() -> None:
    errors = price_list(h100()).interpolation_errors()
    costs = {r.shape["L"]: r.cost_us for r in h100().rows if r.op == "lm_head"}
    sizes = sorted(costs)
    inner = [
        (costs[a] + (n - a) / (b - a) * (costs[b] - costs[a])) / costs[n] - 1
        for a, n, b in zip(sizes, sizes[1:], sizes[2:], strict=False)
    ]
    assert errors["lm_head 2560→151936"] == pytest.approx(inner)
    assert all(math.isfinite(e) for op in errors.values() for e in op)


@pytest.mark.parametrize("name", ["TPU", "B300"])
def test_an_unknown_card_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="H100 H200 A100 4090 5090 L4"):
        priced_card(name, ledger.newest(ledger.read()))
