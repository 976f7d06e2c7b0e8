"""Rewrite rules: fused forms in the place of the calls that they combine, where their preconditions hold.

A rule looks at calls that follow each other. A call between them, such as a reduction over ranks, keeps it
from applying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pegainfer.lower.cuda.lowering import Step
from pegainfer.ops.program import OpCall, is_read
from pegainfer.ops.tensor import Dim, Kind, Tensor


class Temporaries:
    """Tensors that only rewritten calls have; calls that ask for the same name share one."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def tensor(self, name: str, *shape: Dim, dtype: str) -> Tensor:
        key = f"{name} {list(shape)}"
        return self.by_name.setdefault(key, Tensor(key, shape, dtype, Kind.BUFFER))


Calls = Sequence[OpCall]


@dataclass(frozen=True)
class Rule:
    """A fused form.

    Args:
        pattern: ops that must follow each other; () for a whole program.
        apply: from the calls, the first matched one to the program's last, those that take the place of the
            matched ones; or the precondition that does not hold.
    """

    name: str
    pattern: tuple[frozenset[str], ...]
    apply: Callable[[Calls, Step, Temporaries], list[OpCall] | str]


@dataclass
class Rewritten:
    """A step's calls.

    Args:
        calls: each with how many calls of the program it stands for.
        applied: how often each rule was used.
        lacking: of rules that were not used, the first precondition that did not hold.
    """

    calls: list[tuple[OpCall, int]]
    temporaries: dict[str, Tensor] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)


def rewrite(calls: Calls, step: Step, rules: Sequence[Rule]) -> Rewritten:
    """Applies the rules in order, each from the first call to the last."""
    done = Rewritten([(call, 1) for call in calls])
    temporaries = Temporaries()
    for rule in rules:
        _apply(rule, done, step, temporaries)
    done.temporaries = temporaries.by_name
    return done


def _apply(rule: Rule, done: Rewritten, step: Step, temporaries: Temporaries) -> None:
    before = [call for call, _ in done.calls]
    calls: list[tuple[OpCall, int]] = []
    at = 0
    while at < len(before):
        rest = before[at:]
        width = len(rule.pattern) or len(before)
        taken = done.calls[at : at + width]
        if len(rest) < width or any(
            c.spec.name not in ops for c, ops in zip(rest, rule.pattern, strict=False)
        ):
            calls.append(done.calls[at])
            at += 1
            continue
        made = rule.apply(rest, step, temporaries)
        if isinstance(made, str):
            done.lacking.setdefault(rule.name, made)
            calls.append(done.calls[at])
            at += 1
            continue
        counts = [n for _, n in taken]
        if len(made) != len(taken):
            counts = [sum(counts), *[0] * (len(made) - 1)]
        calls += zip(made, counts, strict=True)
        done.applied[rule.name] = done.applied.get(rule.name, 0) + 1
        at += width
    done.calls = calls


def with_op(call: OpCall, **operands: Tensor) -> dict[str, Tensor]:
    """A call's operands with others in their place or beside them."""
    return {**call.tensors, **operands}


def lacks_own_heads(calls: Calls) -> str | None:
    """What a projection of heads lacks so that the attention behind it may take its place; None: nothing.

    calls: the projection, the attention, and all behind them.
    """
    heads, attention = (call.tensors for call in calls[:2])
    q = heads["q"].storage
    same = q is attention["q"].storage and heads["kv"].storage is attention["kv"].storage
    if not same or calls[0].attrs["layer"] != calls[1].attrs["layer"]:
        return "attention over the same heads and the same layer's cache"
    if q.kind is not Kind.BUFFER or is_read(calls[2:], q):
        return "heads that only attention reads"
    return None
