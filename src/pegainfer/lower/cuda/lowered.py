"""A program lowered for one set of sizes: its launches, and the graph that replays them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pegainfer.contract.errors import OpError
from pegainfer.lower.cuda.bind import Work
from pegainfer.lower.cuda.inputs import Layout
from pegainfer.runtime.cuda.graph import Graph
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.stream import Stream


@dataclass
class LoweredStep:
    """Called with a stream, puts the step on it.

    Args:
        work: `ahead` launches before the first call, then those of each call.
        counts: launches of each call.
        memory: what else the launches point into beside the arena.
        graph_name: of a step that is replayed as a graph, which is made before it is first called.
        made: the first launch makes the step's inputs.
    """

    env: dict[str, int]
    work: list[Work]
    ahead: int
    counts: list[int]
    inputs: Layout
    memory: tuple[DeviceBuffer, ...]
    graph_name: str | None = None
    graph: Graph | None = None
    made: bool = False

    def __call__(self, stream: Stream) -> None:
        if self.graph_name is not None and self.graph is None:
            self.make_graph(stream)
        if self.graph is not None:
            self.graph.launch(stream)
        else:
            self._launch(stream)

    def begin_with(self, make_inputs: Work) -> None:
        """`make_inputs` fills all inputs, ahead of everything else."""
        self.work.insert(0, make_inputs)
        self.ahead += 1
        self.made = True

    def run_once(self, stream: Stream, graph_name: str) -> None:
        """Whatever a library or the driver does at a first launch happens here, outside of the graph."""
        self._launch(stream)
        stream.synchronize(graph_name)
        self.graph_name = graph_name

    def make_graph(self, stream: Stream) -> None:
        """Records the launches without running them. Work in flight on the stream continues."""
        assert self.graph_name is not None, "run_once comes first"
        self.graph = Graph(stream, lambda: self._launch(stream), self.graph_name)
        self.graph.upload(stream)

    def _launch(self, stream: Stream) -> None:
        for work in self.work:
            work(stream)


class CapturedSteps:
    """Steps of some sizes, and for each step to come the smallest that it fits into."""

    KEPT = 1024  # sizes for which the answer is kept

    def __init__(self, name: str, symbols: list[str]) -> None:
        """`name`: of the program; `symbols`: its sizes."""
        self._name = name
        self._symbols = symbols
        self._steps: dict[bool, list[LoweredStep]] = {False: [], True: []}  # by whether only decoding
        self._nearest: dict[tuple[object, ...], LoweredStep | None] = {}

    def add(self, step: LoweredStep, decode_only: bool) -> None:
        self._nearest.clear()
        self._steps[decode_only].append(step)
        self._steps[decode_only].sort(key=lambda s: sum(s.env.values()))

    def find(self, env: Mapping[str, int], decode_only: bool) -> LoweredStep | None:
        key = (decode_only, *[env[s] for s in self._symbols])
        if key not in self._nearest:
            if len(self._nearest) == self.KEPT:
                self._nearest.clear()
            fitting = (g for g in self._steps[decode_only] if all(env[s] <= g.env[s] for s in self._symbols))
            self._nearest[key] = next(fitting, None)
        return self._nearest[key]

    def must_find(self, env: Mapping[str, int], decode_only: bool) -> LoweredStep:
        """Raises OpError for sizes that no step was captured for."""
        step = self.find(env, decode_only)
        if step is None:
            raise OpError(f"program {self._name}: only captured steps are replayed", got=env)
        return step
