"""Rows of a table by index: token embedding, and the rows whose logits are wanted."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.pointwise import embedding_bound, embedding_cases, gather_rows_cases
from pegainfer.ops.spec import INTS, In, OpSpec, Out, Tolerance, Weight, declare
from pegainfer.ops.tensor import FLOATS

Array = np.ndarray[Any, Any]


def _take_rows(out: Array, table: Array, ids: Array) -> None:
    out[...] = table[ids]


EMBEDDING = declare(
    OpSpec(
        name="embedding",
        doc="out[t] = table[ids[t]], dequantised",
        operands=(Out("out", "T M"), Weight("table", "V M"), In("ids", "T", INTS, into="V")),
        reference=lambda out, table, ids: _take_rows(out, table, ids),
        bytes=lambda s, held: held["out"] + held["ids"] + held["table"] // s["V"] * s["T"],
        cases=embedding_cases,
        tolerance={
            "f32": Tolerance(0.0, 0.0, "d · q + m may be fused or rounded twice", embedding_bound),
        },
    )
)

GATHER_ROWS = declare(
    OpSpec(
        name="gather_rows",
        doc="out[l] = x[rows[l]]",
        operands=(Out("out", "L M"), In("x", "T M", FLOATS), In("rows", "L", INTS, into="T")),
        idle="T",
        reference=lambda out, x, rows: _take_rows(out, x, rows),
        bytes=lambda s, held: 2 * held["out"] + held["rows"],
        cases=gather_rows_cases,
        tolerance={"f32": Tolerance(0.0, 0.0, "a copy")},
    )
)
