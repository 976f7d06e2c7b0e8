"""The ledger: what follows from a measurement, the file, the newest of a key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pegainfer.ops.coarse
import pegainfer.ops.sample  # noqa: F401
from pegainfer.contract.errors import ConfigError
from pegainfer.measure.ledger import (
    FORWARD,
    LEDGER,
    Roofline,
    Row,
    append,
    memory_of,
    newest,
    read,
    shape_of,
    shape_text,
)
from pegainfer.ops.spec import REGISTRY

ROOF = Roofline(read_gb_s=20.0, cache_gb_s=100.0, peaks={"f32": 100.0, "int8": 400.0})


def row(**changes: Any) -> Row:
    """A row of 1 MB and 10 MFLOP that took 100 µs."""
    fields: dict[str, Any] = {
        "op": "linear", "variant": "cpu.avx512.q4_1.int8", "shape": {"T": 1, "N": 576, "K": 1536},
        "formats": {"w": "q4_1"}, "device": "some CPU", "threads": 2, "source": "abc", "error": 1e-3,
        "tolerance_share": 0.5, "us": 100.0, "us_p10": 90.0, "us_p90": 130.0, "samples": 50,
        "bytes": 1_000_000, "flops": 10_000_000, "memory": "dram", "arithmetic": "int8", "roofline": ROOF,
        "model": "some model", "calls": 30, "commit": "1234567", "command": "pegainfer bench ops",
        "date": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return Row(**(fields | changes))


def test_rates_and_floor_follow_from_the_measurement() -> None:
    memory = row()
    assert (memory.gb_s, memory.gflop_s) == (10.0, 100.0)
    assert memory.floor_us == 50.0  # 1 MB at 20 GB/s; 10 MFLOP at 400 GFLOP/s are 25 µs
    assert memory.share == 0.5
    assert row(memory="cache").floor_us == 25.0  # arithmetic bounds it: 1 MB from caches are 10 µs
    assert row(arithmetic="f32").floor_us == 100.0


def test_no_call_is_shorter_than_a_launch() -> None:
    launched = msgspec.structs.replace(ROOF, launch_us=60.0)
    assert row(roofline=launched).floor_us == 60.0
    assert row(roofline=launched, memory="cache").floor_us == 60.0
    assert row(roofline=launched, bytes=2_000_000).floor_us == 100.0
    assert launched.best_of(msgspec.structs.replace(launched, launch_us=50.0)).launch_us == 50.0


def test_what_a_step_pays_for_a_call() -> None:
    assert row().cost_us == 100.0
    assert row(step_us=70.0).cost_us == 70.0
    assert row(step_us=0.0).cost_us == 0.0


def test_a_time_below_the_clock_gives_finite_rates() -> None:
    assert math.isfinite(row(us=0.0).gb_s)
    assert math.isfinite(row(us=0.0).share)


def test_better_of_two_ceilings() -> None:
    other = Roofline(read_gb_s=10.0, cache_gb_s=120.0, peaks={"f32": 110.0, "int8": 300.0})
    best = Roofline(read_gb_s=20.0, cache_gb_s=120.0, peaks={"f32": 110.0, "int8": 400.0})
    assert ROOF.best_of(other) == other.best_of(ROOF) == best


def test_what_is_appended_is_read_again_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    first, second = row(), row(op="attention", case="x", commit=None)
    append([first], path)
    append([second], path)
    assert read(path) == [first, second]


def test_lines_spell_out_what_follows(tmp_path: Path) -> None:
    append([row()], tmp_path / "l")
    line = json.loads((tmp_path / "l").read_text())
    assert (line["gb_s"], line["gflop_s"], line["floor_us"], line["share"]) == (10.0, 100.0, 50.0, 0.5)


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == []


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "l"
    append([row()], path)
    with path.open("a") as f:
        f.write('{"op": "linear"}\n')
    with pytest.raises(ConfigError, match=r"not a row of the ledger: .*variant.*; at .*l:2"):
        read(path)


def test_newest_replaces_its_key_and_keeps_the_place() -> None:
    old, other, new = row(us=3.0), row(threads=1), row(us=2.0, source="def", commit="7654321")
    assert newest([old, other, new]) == [new, other]


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "linear_residual"},
        {"variant": "cpu.avx2.q4_1.int8"},
        {"case": "greedy"},
        {"shape": {"T": 2, "N": 576, "K": 1536}},
        {"device": "other"},
        {"model": "other"},
    ],
)
def test_keys_differ(changes: dict[str, Any]) -> None:
    assert len(newest([row(), row(**changes)])) == 2


def test_a_shape_leaves_out_what_no_time_depends_on() -> None:
    sizes = {"T": 1, "R": 1, "L": 1, "C": 128, "Q": 128, "H": 9, "D": 64, "G": 3, "S": 16}
    sizes |= {"N": 4000, "Y": 30, "W": 512}
    expected = {"C": 128, "D": 64, "G": 3, "H": 9, "Q": 128, "R": 1, "S": 16, "T": 1}
    assert shape_of(REGISTRY["attention"], sizes) == expected
    head = shape_of(REGISTRY["lm_head"], {"T": 512, "L": 1, "M": 576, "V": 49152, "R": 1})
    assert head == {"L": 1, "M": 576, "V": 49152}


def test_weights_and_pages_come_from_memory() -> None:
    from_memory = {name for name, spec in REGISTRY.items() if memory_of(spec) == "dram"}
    assert {"linear", "lm_head", "embedding", "attention", "kv_append"} <= from_memory
    assert not {"sample_tokens", "adjust_logits", "append_tokens", "rms_norm", "silu_mul"} & from_memory


def test_a_shape_in_words() -> None:
    assert shape_text(row()) == "T=1 · N=576 K=1536"
    assert shape_text(row(shape={"J": 0, "L": 2, "V": 9}, case="greedy")) == "L=2 · V=9 · greedy"


def test_the_committed_ledger_is_sound() -> None:
    for r in read(LEDGER):
        assert r.op in REGISTRY or r.op == FORWARD
        assert r.tolerance_share <= 1, r.key
        assert 0 <= r.us_p10 <= r.us <= r.us_p90
        assert r.samples > 0
        assert set(r.roofline.peaks) >= {r.arithmetic}
        assert msgspec.json.decode(msgspec.json.encode(r), type=Row) == r
