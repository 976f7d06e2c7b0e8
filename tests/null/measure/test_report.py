"""The pages made from the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.measure.ledger import LEDGER, read
from pegainfer.measure.report import DOCS, PAGES, main
from pegainfer.measure.report_cpu import FELT_US, report
from tests.null.measure.test_ledger import row

ATTENTION = {"C": 128, "D": 64, "G": 3, "H": 9, "Q": 128, "R": 1, "S": 16, "T": 1}


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def section(text: str, title: str) -> str:
    return text.split(f"### {title}")[1].split("###")[0]


def test_the_committed_page_is_what_the_committed_ledger_gives() -> None:
    rows = read(LEDGER)
    for name, text in PAGES.items():
        assert (DOCS / name).read_text() == text(rows), "run `make docs-kernels`"


def test_no_rows() -> None:
    assert "has no rows yet" in report([])


def test_other_devices_have_no_place_here() -> None:
    assert report([row(variant="cuda.sm90.bf16")]) == report([])


def test_each_machine_has_its_part() -> None:
    text = report([row(), row(threads=1), row(device="other")])
    assert lines(text, "## ") == [
        "## some CPU, 2 threads, some model",
        "## some CPU, 1 threads, some model",
        "## other, 2 threads, some model",
    ]


def test_a_row_in_full() -> None:
    (line,) = lines(section(report([row()]), "Every shape"), "| linear")
    expected = "T=1 · N=576 K=1536 | 100.0 (90.0 – 130.0) | 10.0 | 100.0 | memory | 50% | 50% |"
    assert line == f"| linear | cpu.avx512.q4_1.int8 | {expected}"


@pytest.mark.parametrize(
    ("memory", "flops", "bound"),
    [("dram", 0, "memory"), ("cache", 0, "caches"), ("dram", 10**9, "int8"), ("cache", 10**9, "int8")],
)
def test_what_bounds_a_row(memory: str, flops: int, bound: str) -> None:
    text = report([row(memory=memory, flops=flops)])
    (line,) = lines(section(text, "Every shape"), "| linear")
    assert line.split(" | ")[6] == bound


def test_the_decode_step_adds_up_its_calls() -> None:
    rows = [
        row(calls=30, us=100.0),
        row(op="attention", shape=ATTENTION, calls=30, us=10.0, bytes=100_000, flops=0),
        row(op="attention", shape=ATTENTION | {"C": 1024}, calls=30, us=900.0),
        row(op="sample_tokens", shape={"L": 1, "V": 9}, case="greedy", calls=1, us=5.0, bytes=0, flops=0),
        row(op="sample_tokens", shape={"L": 1, "V": 9}, case="top_k 40", calls=1, us=700.0),
        row(shape={"T": 2, "N": 576, "K": 1536}, us=333.0),
    ]
    step = section(report(rows), "Where a decode step at batch 1 spends its time")
    assert "3.31 ms in kernels, floor 1.65 ms." in step  # 3000 + 300 + 5; 30 · 50 + 30 · 5 µs
    assert [line.split(" | ")[0] for line in lines(step, "| ")[1:]] == [
        "| linear",
        "| attention",
        "| sample_tokens",
    ]


def test_farthest_first_and_only_what_a_step_feels() -> None:
    slow = row(op="slow", us=500.0, calls=1)
    unfelt = row(op="unfelt", us=FELT_US / 30 - 0.1, calls=30, bytes=1, flops=1)
    text = section(report([row(), slow, unfelt]), "Farthest")
    assert "Farthest: **slow** at T=1 · N=576 K=1536, 10.0 times its floor." in text
    assert [line.split(" | ")[0] for line in lines(text, "| ")[1:]] == ["| slow", "| linear"]


def test_main_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path)])
    for name in PAGES:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text()
    assert capsys.readouterr().out == "".join(f"{tmp_path / name}\n" for name in PAGES)
