"""The op bench on the kernels: what it runs is right, cold, and repeatable; the command end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pegainfer.cli.main import main
from pegainfer.kernels.cpu.library import has_bf16
from pegainfer.lower.cpu.backend import CpuOptions
from pegainfer.lower.cpu.encode import lowered
from pegainfer.measure.cpu.opbench import FamilyBench
from pegainfer.measure.cpu.roofline import measure_roofline
from pegainfer.measure.cpu.variant import activation_on, arithmetic_of, variant_of
from pegainfer.measure.ledger import append, newest, read, shape_of
from pegainfer.measure.opbench import CALLS
from pegainfer.measure.step_shapes import StepShape
from pegainfer.measure.workload import Family, families
from pegainfer.ops.program import Program
from pegainfer.ops.sampler import sampler
from tests.cpu.kernels.harness import ISAS
from tests.cpu.kernels.model import CONFIG, formats_of, program
from tests.support.tinymodel import GGUF_MODELS, write_gguf

OPTIONS = CpuOptions(threads=2)
SHAPES = (StepShape(1, 1, 20), StepShape(3, 1, 40), StepShape(1, 19, 33))


def programs(kv: str = "f32") -> list[Program]:
    forward = program(CONFIG, formats_of(CONFIG, ["q4_1"]), kv)
    return [lowered(forward), lowered(sampler(CONFIG.vocab_size, CONFIG.vocab_size, 8, 64, 20))]


FAMILIES = families(programs())


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.spec.name == name)


def bench(f: Family, options: CpuOptions = OPTIONS, cold_bytes: int = 1 << 18) -> FamilyBench:
    return FamilyBench(f, SHAPES, options, cold_bytes)


@pytest.fixture
def head() -> Iterator[FamilyBench]:
    made = bench(family("lm_head"))
    yield made
    made.close()


@pytest.mark.parametrize("f", FAMILIES, ids=lambda f: f.spec.name)
def test_every_op_of_a_step_is_timed_and_right(f: Family) -> None:
    made = bench(f)
    try:
        for shape in SHAPES:
            for options in f.options().values():
                timing = made.time(shape, options, seconds=0)
                assert len(timing.nanoseconds) == made.calls - 1  # one program after the one that warms up
                assert (timing.nanoseconds >= 0).all()
                assert timing.us(0.1) <= timing.us(0.5) <= timing.us(0.9)
                assert shape_of(f.spec, timing.sizes)
                assert made.check(shape, options).faults == ()
    finally:
        made.close()


def test_half_precision_pages() -> None:
    (f,) = (f for f in families(programs("f16")) if f.spec.name == "attention")
    made = bench(f)
    try:
        assert made.check(SHAPES[1], {}).faults == ()
        # K and V of 40 tokens in 3 rows, 2 heads of 48, 2 bytes each; q and out of 6 heads in float32.
        assert made.time(SHAPES[1], {}, 0).cost.bytes == 3 * (40 * 2 * 2 * 48 * 2 + 2 * 6 * 48 * 4)
    finally:
        made.close()


def test_costs_are_those_of_the_shape(head: FamilyBench) -> None:
    cost = head.time(SHAPES[1], {}, 0).cost
    vocab, width = CONFIG.vocab_size, CONFIG.hidden_size
    assert cost.flops == 2 * 3 * vocab * width
    assert cost.bytes == vocab * width // 32 * 20 + 3 * 4 * (vocab + width)


def test_calls_have_weights_of_their_own_until_they_fill_the_cache(head: FamilyBench) -> None:
    each = CONFIG.vocab_size * CONFIG.hidden_size // 32 * 20
    assert head.calls == -(-(1 << 18) // each)
    few = bench(family("lm_head"), cold_bytes=0)
    assert few.calls == 3
    few.close()


def test_calls_without_weights_are_a_fixed_number() -> None:
    for name in ("attention", "embedding", "sample_tokens"):
        made = bench(family(name))
        assert made.calls == CALLS
        made.close()


def test_more_seconds_bring_more_samples(head: FamilyBench) -> None:
    assert len(head.time(SHAPES[0], {}, 0.05).nanoseconds) > len(head.time(SHAPES[0], {}, 0).nanoseconds)


def test_variants_name_instruction_set_formats_and_arithmetic() -> None:
    product, attention, draw = (family(n) for n in ("linear_residual", "attention", "sample_tokens"))
    assert variant_of(product.spec, product.dtypes, "avx2", "int8") == "cpu.avx2.q4_1.int8"
    assert variant_of(product.spec, product.dtypes, "avx2", "f32") == "cpu.avx2.q4_1.f32"
    assert variant_of(product.spec, product.dtypes, "avx2", "bf16") == "cpu.avx2.q4_1.int8"
    assert variant_of(attention.spec, attention.dtypes, "avx2", "bf16") == "cpu.avx2.f32.f32"
    assert variant_of(draw.spec, draw.dtypes, "avx2", "int8") == "cpu.avx2.f32"
    halves = product.dtypes | {"w": "bf16"}
    assert arithmetic_of(product.spec, halves, "int8") == "f32"  # only quantised weights meet 8 bits
    assert variant_of(product.spec, halves, "avx512", "bf16") == "cpu.avx512.bf16.bf16"


@pytest.mark.parametrize("isa", ISAS)
def test_bf16_is_asked_of_kernels_that_multiply_it(isa: str) -> None:
    assert activation_on("bf16", isa) == ("bf16" if has_bf16(isa) else "int8")
    assert activation_on("f32", isa) == "f32"


def test_bf16_weights_are_timed_as_a_step_multiplies_them() -> None:
    forward = program(CONFIG, formats_of(CONFIG, ["bf16"]), "f32")
    (f,) = (f for f in families([lowered(forward)]) if f.spec.name == "lm_head")
    made = bench(f, CpuOptions(threads=2, activation="bf16"))
    try:
        named = made.identity(SHAPES[0])
        expected = "bf16" if has_bf16() else "f32"
        assert named.arithmetic == expected
        assert named.variant.endswith(f".bf16.{expected}")
        assert named.arithmetic in measure_roofline(1).peaks
        assert made.check(SHAPES[1], {}).faults == ()
    finally:
        made.close()


def test_the_command_measures_prints_and_appends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_gguf(GGUF_MODELS["gguf_q4_1"][0], tmp_path / "tiny.gguf", GGUF_MODELS["gguf_q4_1"][1])
    ledger = tmp_path / "ledger.jsonl"
    flags = ["--op", "linear_residual", "--op", "sample_tokens", "--threads", "1", "--isa", ISAS[-1]]
    assert main(["bench", "ops", str(model), *flags, "--append", "--ledger", str(ledger)]) == 0
    rows = read(ledger)
    printed = capsys.readouterr().out
    assert f"{len(rows)} rows appended to {ledger}" in printed
    assert {(r.op, r.variant) for r in rows} == {
        ("linear_residual", "cpu.portable.q4_1.int8"),
        ("sample_tokens", "cpu.portable.f32"),
    }
    tokens = sorted(r.shape["T"] for r in rows if r.op == "linear_residual" and r.shape["K"] == 96)
    assert tokens == [1, 2, 4, 8, 16, 128]  # 512 is past what the model was trained for
    assert {(r.model, r.threads, r.calls) for r in rows if r.op == "linear_residual"} == {("tiny", 1, 2)}
    assert all(r.tolerance_share <= 1 and r.us > 0 and r.samples > 0 for r in rows)
    assert printed.count("linear_residual") == sum(r.op == "linear_residual" for r in rows)
    append(rows, ledger)
    assert newest(read(ledger)) == rows


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--op", "linaer"], "no such op in this model's step; expected embedding"),
        (["--ledger", "x"], "--ledger does nothing alone; remedy: add --append"),
        (["--device", "null"], "no ops to bench; expected --device cpu or cuda; got null"),
        (["--max-model-len", "9"], "--max-model-len does not apply; at bench ops --device cpu"),
        (["--isa", "sse9"], "no kernels for this instruction set"),
    ],
)
def test_bad_flags_end_in_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_gguf(GGUF_MODELS["gguf_q4_1"][0], tmp_path / "tiny.gguf", GGUF_MODELS["gguf_q4_1"][1])
    assert main(["bench", "ops", str(model), *flags]) == 2
    assert message in capsys.readouterr().err


def test_bench_engine_shows_a_step_by_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_gguf(GGUF_MODELS["gguf_q4_1"][0], tmp_path / "tiny.gguf", GGUF_MODELS["gguf_q4_1"][1])
    sizes = ["--prefill", "40", "--batch", "2", "--decode", "12", "--rounds", "1"]
    assert main(["bench", "engine", str(model), *sizes, "--output", str(tmp_path / "out.jsonl")]) == 0
    prefill, decode = capsys.readouterr().out.split("\n\n")[1:]
    assert prefill.startswith("prefill 40: ")
    assert decode.startswith("decode 12 × 2: ")
    for part in (prefill, decode):
        calls = {line[2:36].strip(): line[36:42].strip() for line in part.splitlines()[2:]}
        assert calls["attention"] == calls["linear_residual 96→64"] == "2"  # layers
        assert calls["lm_head 64→160"] == "1"
        assert "between steps" in calls
