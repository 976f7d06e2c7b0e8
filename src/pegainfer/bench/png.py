"""The run as a PNG; matplotlib comes with the extra `plot`."""

from __future__ import annotations

from pathlib import Path

from pegainfer.bench.run import Run
from pegainfer.bench.series import series
from pegainfer.contract.errors import UnsupportedError


def save_png(run: Run, path: Path) -> None:
    """Draws distributions, throughput and timeline. Raises UnsupportedError where matplotlib is missing."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    data = series(run)
    figure = Figure(figsize=(12, 10), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    for name, points in data.cdfs.items():
        axes[0, 0].plot([x for x, _ in points], [y for _, y in points], label=name)
    axes[0, 0].set(xscale="log", xlabel="ms", ylabel="share of values at most this", title="Latencies")
    if data.cdfs:
        axes[0, 0].legend()
    axes[0, 1].plot([x for x, _ in data.tokens], [y for _, y in data.tokens])
    axes[0, 1].set(xlabel="s", ylabel="tokens/s", title="Output tokens a second", ylim=(0, None))
    axes[1, 0].plot([x for x, _ in data.running], [y for _, y in data.running])
    axes[1, 0].set(xlabel="s", ylabel="requests", title="Requests in flight", ylim=(0, None))
    rows = range(len(data.bars))
    for left, right, color in (("arrived", "sent", "0.8"), ("sent", "first", "C1"), ("first", "end", "C0")):
        begins = [getattr(bar, left) for bar in data.bars]
        widths = [getattr(bar, right) - begin for bar, begin in zip(data.bars, begins, strict=True)]
        axes[1, 1].barh(rows, widths, left=begins, height=0.9, color=color)
    axes[1, 1].invert_yaxis()
    axes[1, 1].set(xlabel="s", ylabel="request", title="Waiting, first token, last token")
    figure.savefig(path, dpi=110)


def require_matplotlib() -> None:
    """Raises UnsupportedError where it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "PNG plots need matplotlib",
            where="--plot-png",
            remedy="pip install 'pegainfer[plot]', or use --plot-timeline, which needs nothing",
        ) from error
