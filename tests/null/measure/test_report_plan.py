"""Pages of kernel plans: which kernel runs an op in which phase, from which file, at which price."""

from __future__ import annotations

from functools import cache

from pegainfer.kernels.build import find_sources
from pegainfer.lower.cuda.target import Target, card_of
from pegainfer.measure import ledger
from pegainfer.measure.cards import priced_card
from pegainfer.measure.report_plan import PHASES, PlannedModel, kernel_plan
from tests.support.launch_lists import Case, recorded

Cells = dict[str, list[str]]  # of each op's line, by the op


@cache
def phases(model: str = "Qwen3-4B") -> dict[str, Cells]:
    """The page's tables by title."""
    programs = recorded(Case(model, layers=4)), recorded(Case(model, program="sampler"))
    device = priced_card("H100", ledger.newest(ledger.read()))
    page = kernel_plan(PlannedModel(model, *programs, Target(card_of("90a")), device))
    tables = {}
    for part in page.split("## ")[1:]:
        title, _, body = part.partition("\n")
        lines = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("|")][2:]
        tables[title.split(": ")[0]] = {cells[0]: cells[1:] for cells in lines}
    return tables


ONE, MANY, PROMPT = (title for title, _ in PHASES)


def test_each_phase_names_the_kernels_that_its_plan_launches() -> None:
    many, prompt = phases()[MANY], phases()[PROMPT]
    assert many["attention"][1].split()[0] == "attention_decode_append_bf16_d128"
    assert prompt["linear_residual 9728→2560"][1:3] == ["cublaslt", "the library"]
    assert many["gate_up_swiglu 2560→9728"][0] == "4"  # calls, one for each layer


def test_a_pass_of_one_row_is_one_launch() -> None:
    one = phases()[ONE]
    assert one["embedding 2560→151936"][1] == "row_pass_bf16_d128"
    assert one["attention"][1:3] == ["–", "–"]


def test_every_file_declares_the_kernels_of_its_line() -> None:
    declared = {source.name: set(source.variants) for source in find_sources()}
    seen = 0
    for cells in phases().values():
        for _, kernels, files, *_ in cells.values():
            named = {k for k in kernels.split() if k not in ("cublaslt", "–")}
            found = set().union(*(declared.get(name, set()) for name in files.split()))
            assert named <= found
            seen += len(named)
    assert seen > 20


def test_prices_say_where_they_are_from() -> None:
    assert phases()[MANY]["gate_up_swiglu 2560→9728"][-1] == "measured"
    assert phases("Qwen3-8B")[MANY]["gate_up_swiglu 4096→12288"][-3:] == ["100%", "memory", "roofline"]
