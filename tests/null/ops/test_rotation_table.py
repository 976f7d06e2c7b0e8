"""The rotation's table as a weight: its rows, whole and in parts."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.ops.rotation_table import rotation_table
from pegainfer.runtime.weights.weight import VALUES

POSITIONS = 1000
FREQS = inverse_frequencies(32, 1e6, None)
TABLE = cos_sin_table(POSITIONS, FREQS, 1.25)


def test_values_are_the_tables() -> None:
    assert rotation_table(POSITIONS, FREQS, 1.25).values().tobytes() == TABLE.tobytes()


def test_pairs_that_are_not_rotated_stay_as_they_are() -> None:
    got = rotation_table(POSITIONS, FREQS, 1.25, head_dim=48).values()
    assert got.shape == (POSITIONS, 48)
    np.testing.assert_array_equal(got[:, :16], TABLE[:, :16])
    np.testing.assert_array_equal(got[:, 24:40], TABLE[:, 16:])
    assert (got[:, 16:24] == 1).all() and not got[:, 40:].any()


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (range(0, 1000), range(0, 32)),
        (range(990, 1000), range(0, 32)),
        (range(7, 8), range(0, 32)),
        (range(1, 1000, 9), range(0, 32)),
        (range(3, 20), range(8, 24)),
    ],
)
def test_parts_are_computed_alone(rows: range, columns: range) -> None:
    weight = rotation_table(POSITIONS, FREQS, 1.25)
    part = weight.take(0, [rows]).take(1, [columns]).parts[VALUES]
    into = np.empty(part.nbytes, np.uint8)
    part.read(into)
    want = TABLE[rows.start : rows.stop : rows.step, columns.start : columns.stop]
    np.testing.assert_array_equal(into.view(np.float32).reshape(want.shape), want)
    (extent,) = weight.parts[VALUES].extents
    assert "_whole" not in vars(extent.source)  # no part of it held the table
