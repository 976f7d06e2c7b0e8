"""Sanitizer runs side by side: no test is lost between processes, and no bad end is taken for a good one."""

from __future__ import annotations

import pytest

from tools.sanitize import LEFT_OUT, SHARDS, judge, shards

NAMES = [
    *(
        f"tests/gpu/kernels/test_ops.py::test_float32_matches_the_reference[{op}]"
        for op in ("sample", "rope")
    ),
    *(f"tests/gpu/kernels/test_gemm.py::test_products[{i}]" for i in range(9)),
    "tests/gpu/lower/test_executor.py::test_steps_repeat_bit_by_bit",
    "tests/gpu/kernels/test_new.py::test_something",
    "tests/gpu/models/test_repeats.py::test_a_repeated_step_draws_the_same_tokens[3 in graphs]",
]
GOOD = "=== 4 passed in 9.1s ===\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
HAZARD = (
    "========= Error: Race reported between Read access at {0}+0xb00\n"
    "=========     and Write access at {0}+0x2800 [320 hazards]\n"
)


@pytest.mark.parametrize(("tool", "left_out"), [("memcheck", 0), ("racecheck", 1)])
def test_every_test_has_one_process(tool: str, left_out: int) -> None:
    parts = shards(tool, NAMES)
    assert sorted(n for part in parts for n in part) == sorted(NAMES[: len(NAMES) - left_out])
    assert max(map(len, parts)) <= max(size for _, size in SHARDS[tool])
    assert len(LEFT_OUT) == len(SHARDS)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (GOOD, True),
        (HAZARD.format("nvjet_sm90_tst_8x64") + GOOD, True),
        (GOOD.replace("0 hazards", "2 hazards"), False),
        (HAZARD.format("skinny_bf16_8_1") + GOOD, False),
        (
            "========= Invalid __global__ write of size 4 bytes\n=========     at rms_norm_bf16+0x4240\n"
            + GOOD,
            False,
        ),
        (GOOD.replace("4 passed", "1 failed, 3 passed"), False),
        (GOOD.splitlines()[0], False),
        ("========= Error: process didn't terminate successfully\n" + GOOD, False),
        ("========= Internal Sanitizer Error: no more\n" + GOOD, False),
        ("", False),
    ],
)
def test_only_an_end_without_a_finding_in_our_kernels_is_clean(text: str, clean: bool) -> None:
    assert judge(text).clean(4) is clean
