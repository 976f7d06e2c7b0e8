"""The mixture of experts in float32, token by token, as a straightforward kernel would do it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.null.ops.plain_recurrent import sigmoid

Array = np.ndarray[Any, Any]
F32 = np.float32


def best(rank: list[float], count: int) -> list[int]:
    """The numbers of the `count` greatest values, the lowest first among equals; NaN is below all."""
    clean = [-np.inf if np.isnan(v) else v for v in rank]
    return sorted(range(len(clean)), key=lambda i: (-clean[i], i))[:count]


def route_row(
    logits: Array, bias: Array | None, count: int, *, use_sigmoid: bool, groups: int, kept_groups: int
) -> tuple[list[int], Array]:
    """One token's experts and their scores."""
    if use_sigmoid:
        scores = sigmoid(logits)
    else:
        powers = np.exp(logits - logits.max())
        scores = powers / powers.sum(dtype=F32)
    rank = logits if bias is None else scores + bias
    rank = np.where(np.isnan(rank), F32(-np.inf), rank)
    each = len(rank) // groups
    merits = []
    for group in range(groups):
        members = sorted(rank[group * each : (group + 1) * each], reverse=True)
        merits.append(members[0] if bias is None else sum(members[:2]))
    allowed = [e for g in best(merits, kept_groups) for e in range(g * each, (g + 1) * each)]
    allowed.sort()
    chosen = sorted(allowed[i] for i in best([rank[e] for e in allowed], count))
    return chosen, scores[chosen]


def route(
    a: dict[str, Array],
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    groups: int,
    kept_groups: int,
) -> None:
    for t, logits in enumerate(a["logits"]):
        chosen, scores = route_row(
            logits, a.get("bias"), a["experts"].shape[1],
            use_sigmoid=sigmoid, groups=groups, kept_groups=kept_groups,
        )  # fmt: skip
        if renormalize:
            scores = scores / (scores.sum(dtype=F32) + F32(1e-20))
        a["experts"][t], a["gates"][t] = chosen, scores * F32(scale)


def gate_up(a: dict[str, Array]) -> None:
    for t, row in enumerate(a["experts"]):
        for j, e in enumerate(row):
            gate, up = (a["h"][t] @ a[w][max(e, 0)].T for w in ("w_gate", "w_up"))
            a["act"][t, j] = gate * sigmoid(gate) * up if e >= 0 else 0


def down(a: dict[str, Array]) -> None:
    for t, row in enumerate(a["experts"]):
        total = np.zeros(a["out"].shape[1], F32)
        for j, e in enumerate(row):
            if e >= 0:
                total += a["gates"][t, j] * (a["act"][t, j] @ a["w_down"][e].T)
        a["out"][t] = total


def local(a: dict[str, Array], first: int, count: int) -> None:
    for places, experts in zip(a["local"], a["experts"], strict=True):
        places[:] = [e - first if 0 <= e - first < count else -1 for e in experts]


def block(a: dict[str, Array], eps: float, first: int = 0, count: int | None = None, **routing: Any) -> None:
    x = a["x"]
    h = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True, dtype=F32) + F32(eps)) * a["norm"]
    chosen, width = a["experts"].shape[1], a["w_gate"].shape[1]
    parts = a | {
        "h": h,
        "logits": h @ a["w_router"].T,
        "gates": np.empty((len(x), chosen), F32),
        "act": np.empty((len(x), chosen, width), F32),
    }
    route(parts, **routing)
    held = {"local": np.empty_like(a["experts"]), "experts": a["experts"]}
    local(held, first, len(a["w_gate"]) if count is None else count)
    parts["experts"] = held["local"]
    gate_up(parts)
    down(parts)
