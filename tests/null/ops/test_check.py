"""The checker finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from pegainfer.ops.check import GUARD_BYTES, Report, Trial, check_case, suitable_cases, through_program
from pegainfer.ops.compose import run_reference
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import Program
from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.sample import SAMPLE_TOKENS
from pegainfer.ops.spec import Arrays, Case, OpSpec, Role
from pegainfer.runtime.weights.weight import Weight


def honest(trial: Trial) -> None:
    """The reference as a backend."""
    weights = {k: w.values() for k, w in trial.weights.items()}
    run_reference(trial.spec, trial.sizes, {**trial.arrays, **weights}, trial.attrs)


def first_case(spec: OpSpec, **sizes: int) -> Case:
    """The first case with these sizes."""
    return next(c for c in suitable_cases(spec, 0) if sizes.items() <= c.sizes.items())


def report(spec: OpSpec, spoil: Callable[[Trial], None], **sizes: int) -> Report:
    def run(trial: Trial) -> None:
        honest(trial)
        spoil(trial)

    return check_case(spec, first_case(spec, **sizes), run)


def test_an_honest_backend_passes_and_deviates_by_nothing() -> None:
    r = report(RMS_NORM, lambda trial: None, T=3)
    assert r.faults == () and r.deviations["out"].error == 0 and r.deviations["out"].share == 0


@pytest.mark.parametrize(("ulps", "passes"), [(1, True), (1000, False)])
def test_rounding_passes_and_more_does_not(ulps: int, passes: bool) -> None:
    def spoil(trial: Trial) -> None:
        trial.arrays["out"][...] *= np.float32(1 + ulps * 2.0**-23)

    r = report(RMS_NORM, spoil, T=3)
    assert (r.faults == ()) is passes
    assert r.deviations["out"].share > 0


def test_the_fault_names_place_and_values() -> None:
    def spoil(trial: Trial) -> None:
        trial.arrays["out"][1, 2] = 7

    (fault,) = report(RMS_NORM, spoil, T=3).faults
    assert fault.startswith("out[1, 2]: expected ") and fault.endswith("got 7.0; 1 of 99 wrong")


@pytest.mark.parametrize("past_the_end", [True, False])
def test_a_store_outside_is_seen(past_the_end: bool) -> None:
    def spoil(trial: Trial) -> None:
        out = trial.arrays["out"]
        whole = out.base
        assert isinstance(whole, np.ndarray)
        start = out.ctypes.data - whole.ctypes.data
        whole[start + out.nbytes + GUARD_BYTES - 1 if past_the_end else start - GUARD_BYTES] = 0

    assert report(RMS_NORM, spoil, T=3).faults == ("out: bytes around it were written",)


def test_writing_an_input_is_seen_even_if_it_only_loses_a_sign() -> None:
    def spoil(trial: Trial) -> None:
        trial.arrays["a"][0, 0] = 0.0

    case = first_case(LINEAR, T=1)
    case.arrays["a"][0, 0] = -0.0

    def run(trial: Trial) -> None:
        honest(trial)
        spoil(trial)

    assert check_case(LINEAR, case, run).faults == ("a: only to be read, but was written",)


def test_an_output_left_unwritten_is_seen() -> None:
    def spoil(trial: Trial) -> None:
        trial.arrays["out"][-1] = np.nan

    assert "got nan" in report(RMS_NORM, spoil, T=3).faults[0]
    assert check_case(SAMPLE_TOKENS, first_case(SAMPLE_TOKENS, L=3), lambda trial: None).faults


def test_missing_the_last_product_is_seen() -> None:
    """The bound of a dot product is far below one of its terms."""

    def run(trial: Trial) -> None:
        w = trial.weights["w"].values()
        w[:, -1] = 0
        trial.arrays["out"][...] = trial.arrays["a"] @ w.T

    for k in (64, 576, 1536):
        assert check_case(LINEAR, first_case(LINEAR, K=k), run).faults


def test_whole_numbers_must_be_equal() -> None:
    def spoil(trial: Trial) -> None:
        trial.arrays["tokens"][0] ^= 1

    assert report(SAMPLE_TOKENS, spoil, L=9).faults[0].startswith("tokens[0]: expected ")


def test_the_reference_sees_weights_as_they_are_stored() -> None:
    case = first_case(LINEAR, T=3, K=96)
    for stored in ("q4_1", "q8_0", "q4_0", "bf16", "f16"):
        assert check_case(LINEAR, case, honest, dtypes={"w": stored}).faults == ()

    def requantised(trial: Trial) -> None:
        w = trial.weights["w"]
        honest(replace(trial, weights={"w": quantized_weight("q4_0", w.values())}))

    assert check_case(LINEAR, case, requantised, dtypes={"w": "q4_1"}).faults, "these are other values"


def test_cases_that_a_format_cannot_hold_are_left_out() -> None:
    assert {c.sizes["K"] % 32 for c in suitable_cases(LINEAR, 0, {"w": "q4_1"})} == {0}
    assert any(c.sizes["K"] % 32 for c in suitable_cases(LINEAR, 0))
    assert not any("huge" in c.label for c in suitable_cases(LINEAR, 0, {"a": "f16"}))


def test_a_rounding_border_of_the_storage_is_allowed_for() -> None:
    """Float16 outputs may be one unit off where the exact value lies near the middle of two."""

    def run(trial: Trial) -> None:
        honest(trial)
        out = trial.arrays["out"]
        out[...] = np.nextafter(out, np.float16(np.inf))

    case = first_case(LINEAR, T=3, K=96)
    assert check_case(LINEAR, case, run, dtypes={"out": "f16"}).faults == ()


def test_through_program_stages_what_is_written_in_place() -> None:
    """The one-call program runs on an executor that never writes the caller's inputs."""

    def execute(
        program: Program,
        weights: Mapping[str, Weight],
        states: Arrays,
        inputs: Arrays,
        sizes: Mapping[str, int],
    ) -> Arrays:
        plain = {k: w.values() for k, w in weights.items()}
        frozen = {k: a.copy() for k, a in inputs.items()}
        for a in frozen.values():
            a.flags.writeable = False
        return ReferenceExecutor(program, {**plain, **states}).run(frozen, sizes)

    for spec in (LINEAR_RESIDUAL, LINEAR, RMS_NORM):
        for case in suitable_cases(spec, 0):
            assert check_case(spec, case, through_program(execute)).faults == ()
    assert LINEAR_RESIDUAL.operand("x").role is Role.INOUT
