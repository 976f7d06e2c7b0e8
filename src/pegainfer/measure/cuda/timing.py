"""Device time of launches as a step makes them: inside a graph, between two events."""

from __future__ import annotations

from collections.abc import Iterable

from pegainfer.lower.cuda.bind import Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runtime.cuda.graph import Graph
from pegainfer.runtime.cuda.stream import Event


def graph_times(ctx: CudaContext, work: Iterable[Work], repeats: int, where: str) -> list[float]:
    """Microseconds of each of `repeats` replays, the first one after two that warm up.

    Args:
        work: at least one launch.
        where: for errors.
    """
    launches = list(work)

    def body() -> None:
        for launch in launches:
            launch(ctx.stream)

    body()  # a library or the driver may do extra work at a first launch, which must stay out of the graph
    graph = Graph(ctx.stream, body, where)
    try:
        marks = []
        for _ in range(2):
            graph.launch(ctx.stream)
        for _ in range(repeats):
            start, stop = Event(timing=True), Event(timing=True)
            start.record(ctx.stream)
            graph.launch(ctx.stream)
            stop.record(ctx.stream)
            marks.append((start, stop))
        ctx.stream.synchronize(where)
        return [1e3 * stop.milliseconds_since(start) for start, stop in marks]
    finally:
        graph.close()
