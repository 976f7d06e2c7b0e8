"""pegainfer simulate: how fast a model will serve a workload, and why, without the device."""

from __future__ import annotations

import dataclasses
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.bench.config import DatasetConfig, LoadConfig, ReportConfig, SamplingConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.target import MODEL_HELP, ModelFlags, Target, choose, load_text_side
from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.app.simulation import SimulatedEngine
    from pegainfer.cli.bench_serve import BenchTokenizer
    from pegainfer.measure.cards import PricedDevice

# Flags of `bench serve` that only a real server or client has.
REFUSED = (
    "--num-warmups", "--client-processes", "--probe-health", "--extra-body", "--stream-response",
    "--plot-png", "--logprobs", "--frequency-penalty", "--presence-penalty", "--repetition-penalty",
    "--chat-template", "--default-chat-template-kwargs",
)  # fmt: skip
VALUE = re.compile(r"[\d.]+(:[\d.]+)?")  # a number or a range, which is no model
TEXT_DATASETS = ("sharegpt", "custom")
CONTEXT = 1024  # tokens of each row, for --tpot


@dataclass(frozen=True, kw_only=True)
class SimulateFlags:
    """Raises ConfigError for sizes that are none."""

    card: str = field(
        default="",
        metadata={
            "help": "A GPU: one that the ledger has prices of (H100), or a data sheet's (H200 A100 4090 5090 "
            "L4). Without it the CPU that was measured."
        },
    )
    ledger: str = field(default="", metadata={"help": "File of the ledger; default: the package's own."})
    commit: str = field(default="", metadata={"help": "Only prices that were measured at this commit."})
    ttft: tuple[int, ...] = field(
        default=(), metadata={"help": "Only say the time to the first token of a prompt of so many tokens."}
    )
    tpot: tuple[int, ...] = field(
        default=(),
        metadata={"help": f"Only say the time of a decode step of so many rows at a context of {CONTEXT}."},
    )
    sweep: Literal["rate", "concurrency"] | None = field(
        default=None,
        metadata={"help": "Run the workload over a range of rates or concurrencies, as --sweep rate 1:64."},
    )

    def __post_init__(self) -> None:
        if any(n < 1 for n in (*self.ttft, *self.tpot)):
            raise ConfigError("sizes of --ttft and --tpot", expected="≥ 1", got=(*self.ttft, *self.tpot))


More = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[VALUE]...",
        help="More values of --tpot, --ttft, --goodput or --metadata; the range of --sweep.",
    ),
]


def simulate(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    more: More = None,
    *,
    ask: SimulateFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    load: LoadConfig,
    dataset: DatasetConfig,
    sampling: SamplingConfig,
    report: ReportConfig,
    given: Given,
) -> int:
    """Predict how fast a model will serve, with the real scheduler and prices of the kernels' ledger.

    Workloads and figures are those of `bench serve`. A model's config.json is enough.
    """
    from pegainfer.app.simulation import simulated_engine
    from pegainfer.cli import simulate_report, simulate_run
    from pegainfer.cli.bench_serve import with_more

    if refused := sorted(set(REFUSED) & given):
        raise ConfigError("only a real server or client has this", got=" ".join(refused), where="simulate")
    more = more or []
    if model is not None and VALUE.fullmatch(model):  # the default model, and a flag's second value
        more, model = [model, *more], None
    ask, span = _with_more(ask, [v for v in more if VALUE.fullmatch(v)])
    report = with_more(report, [v for v in more if not VALUE.fullmatch(v)])
    device = _device(ask, flags)
    if device.cuda:
        flags = dataclasses.replace(flags, device="cuda")
        engine = dataclasses.replace(engine, load_format=_load_format(model or flags.model_path))
    target = choose(model, flags, engine, scheduler, given, text=False)
    case = simulate_run.sampling_case(sampling)
    made = simulated_engine(Path(target.spec.path), target.spec.engine, scheduler, device, case)
    _say_origin(target.spec.name, device, made)
    if ask.ttft or ask.tpot:
        simulate_report.print_quick(made, ask.ttft, ask.tpot, CONTEXT)
        return 0
    plan = simulate_run.Workload(target.spec.name, load, dataset, sampling, report, _text(target, dataset))
    if span is not None:
        assert ask.sweep is not None
        simulate_report.print_sweep(made, plan, ask.sweep, span)
        return 0
    done = simulate_run.run(made, plan)
    simulate_report.tell(made, done)
    return 0 if done.run.figures.completed else 1


def _with_more(ask: SimulateFlags, values: list[str]) -> tuple[SimulateFlags, tuple[float, float] | None]:
    """Numbers that stand after --tpot or --ttft, given to the flag; and the range of a sweep."""
    numbers, ranges = [v for v in values if ":" not in v], [v for v in values if ":" in v]
    if len(ranges) != (ask.sweep is not None):
        raise ConfigError(
            "the range of a sweep", expected="LOW:HIGH after --sweep and nowhere else", got=ranges
        )
    span = None
    if ranges:
        try:
            low, high = (float(part) for part in ranges[0].split(":"))
        except ValueError:
            low = high = 0.0
        if not 0 < low <= high:
            raise ConfigError("the range of a sweep", expected="LOW:HIGH, 0 < LOW ≤ HIGH", got=ranges[0])
        span = low, high
    if not all(n.isdecimal() and int(n) for n in numbers) or (numbers and not (ask.tpot or ask.ttft)):
        raise ConfigError("numbers", expected="whole ones ≥ 1, and --tpot or --ttft before them", got=numbers)
    sizes = tuple(int(n) for n in numbers)
    if ask.tpot:
        return dataclasses.replace(ask, tpot=(*ask.tpot, *sizes)), span
    return dataclasses.replace(ask, ttft=(*ask.ttft, *sizes)), span


def _device(ask: SimulateFlags, flags: ModelFlags) -> PricedDevice:
    """Raises ConfigError for a card that is not known, and UnsupportedError for a device without prices."""
    from pegainfer.measure import ledger
    from pegainfer.measure.cards import priced_card, priced_cpu

    if flags.device not in ("cpu", "cuda"):
        raise UnsupportedError(
            "steps of this device have no prices", expected="cpu or cuda", got=flags.device
        )
    if flags.device == "cuda" and not ask.card:
        raise ConfigError("which GPU", expected="--card, such as --card H100", got="none")
    path = Path(ask.ledger) if ask.ledger else ledger.LEDGER
    rows = [r for r in ledger.read(path) if not ask.commit or r.commit == ask.commit]
    if not rows:
        raise ConfigError("no prices", where=f"{path} {ask.commit}".strip())
    rows = ledger.newest(rows)
    return priced_card(ask.card, rows) if ask.card else priced_cpu(rows)


def _load_format(reference: str | None) -> str:
    """A GGUF file is read for its formats; of other models, whose weights become bf16, config.json does."""
    return "auto" if reference is None or ".gguf" in reference.lower() or ":" in reference else "dummy"


def _text(target: Target, dataset: DatasetConfig) -> BenchTokenizer | None:
    """What turns a dataset's texts into tokens. Raises ConfigError where it needs a tokenizer."""
    from pegainfer.cli.bench_serve import BenchTokenizer

    if target.spec.tokenizer:
        return BenchTokenizer(target.spec.tokenizer, load_text_side(target))
    if dataset.dataset_name in TEXT_DATASETS:
        raise ConfigError(f"the dataset {dataset.dataset_name} holds texts", remedy="give --tokenizer")
    return None


def _say_origin(name: str, device: PricedDevice, made: SimulatedEngine) -> None:
    """What is simulated, then on standard error what a reader must know of its prices."""
    info = made.info
    print(f"{name} on {device.name}: {info.num_blocks[0]} blocks, {info.max_slots} sequences of at most "
          f"{info.max_model_len} tokens")  # fmt: skip
    for note in device.notes:
        print(note, file=sys.stderr)
    for gap in made.prices.gaps():
        print(f"no price of {gap.op} ({gap.calls} calls a step): taken from the roofline", file=sys.stderr)
