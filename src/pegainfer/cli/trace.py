"""pegainfer trace: what the requests of a trace waited for, and what became slower between two traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegainfer.contract.errors import EXIT_FAILED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from pegainfer.contract.observation import RequestRecord
    from pegainfer.observe.trace import Trace

ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # of ids in answers, by route
FILE_HELP = "A file of serve --trace or POST /debug/trace."


@dataclass(frozen=True, kw_only=True)
class ExplainFlags:
    request: str = field(default="", metadata={"help": "Explain the request of this id alone."})
    threshold: float = field(
        default=0.1,
        metadata={
            "help": "Exit with 1 where a cause took this share of the requests' time or more; with "
            "--request, of that request's time."
        },
    )

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold <= 1.0:
            raise ConfigError("no such share", expected="above 0, at most 1", got=self.threshold,
                              where="--threshold")  # fmt: skip


def explain(file: Annotated[str, typer.Argument(help=FILE_HELP)], *, ask: ExplainFlags) -> int:
    """Say where the time of a trace's requests went, the most likely cause first."""
    from pegainfer.observe.trace import read_trace

    trace = read_trace(Path(file))
    if ask.request:
        ids = {ask.request, *(ask.request.removeprefix(prefix) for prefix in ID_PREFIXES)}
        found = [r for r in trace.requests if r.id in ids]
        if not found:
            raise ConfigError(
                "no such request in the trace", got=ask.request, where=file,
                expected=f"one of {len(trace.requests)}, such as {[r.id for r in trace.requests[-3:]]}",
            )  # fmt: skip
        share = _explain_request(trace, found[-1])
    else:
        share = _explain_all(trace)
    return EXIT_FAILED if share >= ask.threshold else EXIT_OK


@dataclass(frozen=True, kw_only=True)
class DiffFlags:
    regression: float = field(
        default=0.1, metadata={"help": "Exit with 1 where an op has become slower by this share or more."}
    )

    def __post_init__(self) -> None:
        if not self.regression > 0.0:
            raise ConfigError("no such share", expected="above 0", got=self.regression, where="--regression")


def diff(
    before: Annotated[str, typer.Argument(help=FILE_HELP)],
    after: Annotated[str, typer.Argument(help="Another one, of the same load.")],
    *,
    ask: DiffFlags,
) -> int:
    """Name the ops that have become slower from one trace to another, else the kinds of step."""
    from pegainfer.observe.diff import host_changes, op_changes, regressions, step_changes
    from pegainfer.observe.trace import read_trace

    a, b = (read_trace(Path(file)).steps for file in (before, after))
    ops, steps = op_changes(a, b), step_changes(a, b)
    if not steps:
        raise ConfigError("the traces have no steps of the same size to compare", where=f"{before}, {after}",
                          remedy="trace the same load twice, for longer")  # fmt: skip
    for title, changes in (("ops of sampled steps", ops), ("steps", steps), ("host", host_changes(a, b))):
        if changes:
            print(f"{title:56} {'before µs':>10} {'after µs':>10} {'ratio':>6} {'beside all':>10}")
        for c in changes:
            print(f"  {c.name:54} {c.before * 1e6:10.1f} {c.after * 1e6:10.1f} {c.ratio:6.2f} "
                  f"{c.relative:10.2f}")  # fmt: skip
    found = regressions(ops or steps, ask.regression)
    print()
    for c in found:
        print(f"slower: {c.name}, {c.ratio:.2f} times its time before ({c.relative:.2f} beside all others)")
    if not found:
        print(f"nothing has become slower by {ask.regression:.0%}")
    return EXIT_FAILED if found else EXIT_OK


def _explain_all(trace: Trace) -> float:
    """Prints the causes of all requests; returns the largest share that one took."""
    from pegainfer.observe.summary import cause_sums, step_means

    requests, steps = trace.requests, trace.steps
    print(f"{trace.model} on {trace.device}: {len(requests)} requests, {len(steps)} steps")
    sums = cause_sums(steps, requests)
    if not sums:
        print("nothing held these requests up")
    else:
        print(f"\n{'cause':24} {'seconds':>9} {'of all':>7} {'requests':>9}")
        for s in sums:
            print(f"{s.cause.value:24} {s.seconds:9.3f} {s.share:7.1%} {s.requests:9}")
        print()
        for s in sums:
            print(f"{s.cause.value}: {s.sentence} (request {s.worst.id}, {s.worst.seconds:.3f} s)")
    if steps:
        print("\nmeans of a step, ms:")
        print("  " + ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in step_means(steps)))
    return max((s.share for s in sums), default=0.0)


def _explain_request(trace: Trace, record: RequestRecord) -> float:
    """Prints where one request's time went; returns the largest share that a cause took."""
    from pegainfer.observe.explain import Explainer
    from pegainfer.observe.summary import phases

    tokens = f"{record.prompt_tokens} prompt tokens ({record.cached_tokens} cached)"
    print(f"request {record.id}: {record.path}, {record.seconds:.3f} s, {tokens}, "
          f"{record.completion_tokens} generated")  # fmt: skip
    for name, seconds in phases(record):
        print(f"  {name:24} {seconds:9.3f} s {seconds / record.seconds:7.1%}")
    findings = Explainer(trace.steps).request(record)
    print()
    for f in findings:
        print(f"{f.cause.value}, {f.seconds:.3f} s: {f.sentence}")
    if not findings:
        print("nothing held this request up")
    return max((f.seconds / record.seconds for f in findings), default=0.0)
