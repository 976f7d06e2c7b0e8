"""The page of the CUDA kernels."""

from __future__ import annotations

import msgspec

from pegainfer.kernels.build import ROOT, Source
from pegainfer.measure.ledger import Roofline, Row
from pegainfer.measure.report_gpu import lost_us, report
from tests.null.measure.test_ledger import row
from tests.null.measure.test_report import lines, section

ROOF = Roofline(read_gb_s=1e3, cache_gb_s=2e3, peaks={"bf16": 1e5, "f32": 1e3}, launch_us=0.75)
ATTENTION = {"C": 1024, "D": 64, "G": 3, "H": 9, "Q": 1024, "R": 1, "S": 16, "T": 1}


def gpu(**changes: object) -> Row:
    """Of 1 MB from memory, 1 µs at the least, that took 4 µs alone and 2 µs in a step, 30 times."""
    fields: dict[str, object] = {
        "variant": "cuda.sm90a.bf16", "kernels": ("rms_norm_bf16", "skinny_bf16_8_1"), "device": "some GPU",
        "threads": 0, "us": 4.0, "us_p10": 3.9, "us_p90": 4.5, "flops": 0, "arithmetic": "bf16",
        "roofline": ROOF, "step_us": 2.0, "step_kernels": ("skinny_bf16_8_1",),
    }  # fmt: skip
    return row(**(fields | changes))


def forward(us: float, **shape: int) -> Row:
    return gpu(op="forward", kernels=(), shape=shape, us=us, calls=1, step_us=None, step_kernels=())


ONE = forward(100.0, T=1, R=1, L=1, C=1024, Q=1024)


def test_no_rows_and_rows_of_processors() -> None:
    assert "has no rows yet" in report([])
    assert report([row()]) == report([])


def test_a_step_lists_its_ops_by_the_time_that_they_lose() -> None:
    rows = [
        gpu(),
        gpu(op="attention", shape=ATTENTION, step_us=3.5, step_kernels=("attention_decode_bf16_d64",)),
        gpu(op="attention", shape=ATTENTION | {"C": 8192}),
        gpu(op="sample_tokens", shape={"L": 1}, case="greedy", calls=1, step_us=None, step_kernels=()),
        gpu(op="sample_tokens", shape={"L": 1}, case="top_k 40", calls=1, step_us=None, us=70.0),
        ONE,
    ]
    text = section(report(rows), "Decoding, 1 row")
    said = "its ops alone add up to 0.24 ms, their floors to 0.06 ms (60% of the pass)."
    assert f"Forward pass 0.10 ms; {said} Then sampling." in text
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines(text, "| ")[1:]]
    assert [cells[0] for cells in found] == ["attention", "linear", "sample_tokens"]
    assert found[1][1:] == [
        "`skinny_bf16_8_1`", "T=1 · N=576 K=1536", "30", "1.0", "4.0", "2.0", "50%", "30", "25%",
    ]  # fmt: skip
    assert found[2][1] == "`rms_norm_bf16` `skinny_bf16_8_1`"  # where it was not seen in a step: alone
    assert found[2][6:] == ["–", "–", "3", "25%"]


def test_a_step_that_was_not_timed_has_no_part() -> None:
    assert "### Decoding" not in report([gpu()])


def test_the_work_list_begins_with_what_loses_most() -> None:
    rows = [gpu(), gpu(op="slow", calls=1, step_us=500.0), gpu(op="fast", step_us=1.0), ONE]
    text = section(report(rows), "Worst first")
    assert [line.split(" | ")[0] for line in lines(text, "| ")[1:]] == ["| slow", "| linear", "| fast"]
    assert lost_us(gpu(step_us=0.5)) == 0  # hidden behind others: nothing is won twice


def test_a_pass_that_is_one_launch_stands_for_its_ops() -> None:
    once = msgspec.structs.replace(ONE, kernels=("row_pass_bf16_d64",))
    sampled = gpu(op="sample_tokens", shape={"L": 1}, case="greedy", calls=1, step_us=None)
    text = report([gpu(step_us=None), gpu(shape={"T": 2, "N": 576, "K": 1536}), sampled, once])
    assert "Forward pass 0.10 ms, one launch (`row_pass_bf16_d64`); its ops alone" in text
    worst = lines(section(text, "Worst first"), "| ")[1:]
    assert [line.split(" | ")[0] for line in worst] == ["| forward", "| linear", "| sample_tokens"]
    assert "T=2" in worst[1]


def test_what_others_hide_and_what_only_a_launch_bounds() -> None:
    text = section(report([gpu(step_us=0.0), gpu(op="small", bytes=10, step_us=1.5)]), "Every shape")
    hidden, small = lines(text, "| linear")[0], lines(text, "| small")[0]
    assert " | memory | 25% | 0.0 | hidden | " in hidden
    assert " | launch | 19% | 1.5 | 50% | " in small  # floor 0.75 µs


def test_kernels_stand_by_source_with_their_ops_and_what_they_take() -> None:
    norm = Source(ROOT / "common" / "norm.cu", ("rms_norm",), {"norm_bf16": {"dtype": "bf16"}})
    products = Source(
        ROOT / "sm90" / "skinny.cu",
        ("linear", "lm_head"),
        {"skinny_8": {"dtype": "bf16", "tokens": "8"}, "skinny_16": {"dtype": "bf16", "tokens": "16"}},
    )
    text = report([], [norm, products]).split("## Kernels\n")[1]
    assert lines(text, "| ")[1:] == [
        "| `common/norm.cu` | rms_norm | `norm_bf16`: dtype bf16 |",
        "| `sm90/skinny.cu` | linear, lm_head | 2, `skinny_8` and others: dtype bf16, tokens 8 16 |",
    ]
