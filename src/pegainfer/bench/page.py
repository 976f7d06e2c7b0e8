"""The run as one HTML page: inline SVG, no script, nothing fetched; light or dark as the system is."""

from __future__ import annotations

import math
from html import escape

from pegainfer.bench.report import NAMES, percentile_name
from pegainfer.bench.run import Run
from pegainfer.bench.series import Bar, Points, Series, series

WIDTH, HEIGHT = 460, 240  # of one chart, px
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 34
TICKS = 5
LONG_WIDTH = 940
BAR_SPACE = 640.0  # px that the timeline's bars share
BAR_LEAST, BAR_MOST = 0.5, 8.0

STYLE = """
:root{color-scheme:light dark;--back:#fff;--ink:#1c2024;--faint:#8b929a;--grid:#e4e7ea;
--a:#2866c4;--b:#d0672a;--wait:#c3c8ce;--bad:#c62f3c;--panel:#f7f8f9}
@media(prefers-color-scheme:dark){:root{--back:#15181b;--ink:#e6e8ea;--faint:#8b929a;--grid:#2c3136;
--a:#6ea3f5;--b:#f0965a;--wait:#4a5057;--bad:#f2636e;--panel:#1d2125}}
body{margin:2rem auto;max-width:980px;padding:0 1rem;background:var(--back);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.35rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{color:var(--faint);margin:.2rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .8rem .2rem 0;text-align:right;font-weight:400}
td:first-child,th:first-child{text-align:left}
th{color:var(--faint)}.charts{display:flex;flex-wrap:wrap;gap:1rem}svg{background:var(--panel);max-width:100%;
height:auto;border-radius:6px}text{fill:var(--faint);font:11px system-ui,sans-serif}
.grid{stroke:var(--grid)}.line{fill:none;stroke:var(--a);stroke-width:1.6}.second{stroke:var(--b)}
.queue{fill:var(--wait)}.prefill{fill:var(--b)}.decode{fill:var(--a)}.failed{fill:var(--bad)}
.key i{display:inline-block;width:.8em;height:.8em;margin:0 .35em 0 1em;border-radius:2px}
.bad{color:var(--bad)}
"""


def page(run: Run, notes: list[str], more: str = "") -> str:
    """The whole document.

    Args:
        notes: lines that the report ends with.
        more: HTML behind the figures.
    """
    data = series(run)
    title = f"{run.model or 'model'} · {run.plan.report.label or run.plan.server.api}"
    charts = "".join(
        _chart([points], unit="ms", title=f"{name}: share of values at most this", top=1.0)
        for name, points in data.cdfs.items()
    )
    remarks = "".join(f'<p class="bad">{escape(note)}</p>' for note in notes)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{_traffic(run)}</p>{remarks}"
        f"<h2>Figures</h2>{_summary(run)}{_distributions(run)}{more}"
        f'<h2>Latency distributions</h2><div class="charts">{charts}</div>'
        f"<h2>Throughput over time</h2>{_throughput(data)}"
        f"<h2>Requests</h2>{_timeline(data, run.figures.duration)}</body></html>\n"
    )


def _traffic(run: Run) -> str:
    load = run.plan.load
    parts = [
        f"{len(run.records)} requests of {run.plan.dataset.dataset_name}",
        f"rate {load.request_rate:g}/s",
    ]
    if load.max_concurrency is not None:
        parts.append(f"at most {load.max_concurrency} at a time")
    return escape(", ".join(parts))


def _summary(run: Run) -> str:
    f = run.figures
    rows: list[tuple[str, str]] = [
        ("Successful / failed requests", f"{f.completed} / {f.failed}"),
        ("Duration", f"{f.duration:.2f} s"),
        ("Input / output tokens", f"{f.total_input} / {f.total_output}"),
        ("Requests a second", f"{f.request_throughput:.2f}"),
        ("Output tokens a second (peak)", f"{f.output_throughput:.2f} ({f.peak_output:.0f})"),
        ("Most requests in flight", str(f.peak_concurrent)),
    ]
    if f.request_goodput is not None:
        rows.append(("Goodput, requests a second", f"{f.request_goodput:.2f}"))
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{body}</table>"


def _distributions(run: Run) -> str:
    shown = {
        name: d for name, d in run.figures.distributions.items() if name in ("ttft", "tpot", "itl", "e2el")
    }
    percentiles = [p for p, _ in shown["e2el"].percentiles]
    head = "".join(f"<th>P{percentile_name(p)}</th>" for p in percentiles)
    rows = "".join(
        f"<tr><td>{NAMES[name][0]}</td>"
        + "".join(f"<td>{v:.2f}</td>" for v in (d.mean, d.median, d.std, *(v for _, v in d.percentiles)))
        + "</tr>"
        for name, d in shown.items()
    )
    return f"<table><tr><th>ms</th><th>Mean</th><th>Median</th><th>Std</th>{head}</tr>{rows}</table>"


def _throughput(data: Series) -> str:
    tokens = _chart([data.tokens], unit="s", title="Output tokens a second", width=LONG_WIDTH)
    requests = _chart([data.finished], unit="s", title="Requests ended a second")
    running = _chart([data.running], unit="s", title="Requests in flight")
    return f'<div class="charts">{tokens}{requests}{running}</div>'


def ticks(most: float) -> list[float]:
    """About TICKS round numbers from 0 to `most`."""
    if most <= 0:
        return [0.0]
    raw = most / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def _chart(
    lines: list[Points], *, unit: str, title: str, top: float | None = None, width: int = WIDTH
) -> str:
    """Lines over axes from zero. `unit` is of the x axis."""
    right = max((x for line in lines for x, _ in line), default=0.0) or 1.0
    high = top or max((y for line in lines for _, y in line), default=0.0) or 1.0
    across, down = width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x_of(x: float) -> float:
        return LEFT + x / right * across

    def y_of(y: float) -> float:
        return TOP + (1 - y / high) * down

    parts = [
        f'<svg width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
    ]
    for tick in ticks(high):
        y = y_of(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(right):
        parts.append(
            f'<text x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{tick:g}</text>'
        )
    for number, line in enumerate(lines):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        parts.append(f'<polyline class="line{" second" if number else ""}" points="{path}"/>')
    label = f"{title} ({unit})"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 5}">{escape(label)}</text></svg>')
    return "".join(parts)


def _timeline(data: Series, duration: float) -> str:
    """One row a request: waiting for a place, until the first token, until the last."""
    key = "".join(
        f'<i style="background:var(--{color})"></i>{name}'
        for color, name in (("wait", "waits in the client"), ("b", "to the first token"),
                            ("a", "to the last token"), ("bad", "failed"))
    )  # fmt: skip
    step = min(BAR_MOST, max(BAR_LEAST, BAR_SPACE / max(1, len(data.bars))))
    height = TOP + step * len(data.bars) + BOTTOM
    right = max([duration, *(bar.end for bar in data.bars)]) or 1.0
    scale = (LONG_WIDTH - LEFT - RIGHT) / right
    parts = [f'<svg width="{LONG_WIDTH}" height="{height:.0f}" viewBox="0 0 {LONG_WIDTH} {height:.0f}">']
    for tick in ticks(right):
        x = LEFT + tick * scale
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{height - BOTTOM:.1f}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{height - BOTTOM + 14:.1f}" text-anchor="middle">{tick:g} s</text>'
        )
    for row, bar in enumerate(data.bars):
        parts.append(_bar(bar, TOP + row * step, step * 0.85, scale))
    note = f"<p>{data.left_out} requests between these are left out.</p>" if data.left_out else ""
    return f'<p class="key">{key}</p>{note}{"".join(parts)}</svg>'


def _bar(bar: Bar, y: float, height: float, scale: float) -> str:
    spans = [("queue", bar.arrived, bar.sent)]
    if bar.error:
        spans.append(("failed", bar.sent, bar.end))
    else:
        spans += [("prefill", bar.sent, bar.first), ("decode", bar.first, bar.end)]
    rects = "".join(
        f'<rect class="{kind}" x="{LEFT + begin * scale:.2f}" y="{y:.2f}" '
        f'width="{max(0.3, (end - begin) * scale):.2f}" height="{height:.2f}"/>'
        for kind, begin, end in spans
        if end > begin
    )
    what = (
        bar.error
        or f"first token {(bar.first - bar.sent) * 1000:.1f} ms, all {(bar.end - bar.sent) * 1000:.1f} ms"
    )
    return f"<g><title>{escape(f'request {bar.index}: {what}')}</title>{rects}</g>"
