"""Whether the client kept up: a load generator that is late measures itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pegainfer.bench.wire import Outcome

BUSY = 0.9  # share of a core from which on a process cannot be said to have kept up
LAG_SECONDS = 0.02  # p99 of the timers' lag from which on latencies are blurred
LATE_SECONDS = 0.1  # p99 of sending later than scheduled


@dataclass(frozen=True)
class ClientCost:
    processes: int
    cpu_seconds: float  # of all client processes
    cpu_per_event: float  # seconds for each streamed event or whole answer
    busiest: float  # share of one core that the busiest process used
    lag_p99: float  # seconds by which the event loops' timers came late
    late_p99: float  # seconds by which requests went out after their time; 0 where they had none
    machine_share: float  # of all cores that the client may use

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], *, scheduled: bool) -> ClientCost:
        """Of all client processes; `scheduled`: requests had times to go out at."""
        cpu = sum(o.cpu_seconds for o in outcomes)
        events = sum(r.chunks for o in outcomes for r in o.records)
        wall = max((o.wall_seconds for o in outcomes), default=0.0)
        late = [s for o in outcomes for s in o.late] if scheduled else []
        return cls(
            processes=len(outcomes),
            cpu_seconds=cpu,
            cpu_per_event=cpu / events if events else 0.0,
            busiest=max((o.cpu_seconds / o.wall_seconds for o in outcomes if o.wall_seconds), default=0.0),
            lag_p99=_p99([s for o in outcomes for s in o.lags]),
            late_p99=_p99(late),
            machine_share=cpu / (wall * len(os.sched_getaffinity(0))) if wall else 0.0,
        )

    @property
    def bottleneck(self) -> bool:
        return self.busiest >= BUSY or self.late_p99 >= LATE_SECONDS or self.machine_share >= BUSY

    def verdicts(self) -> list[str]:
        """What a reader of the results must know of the client; nothing where it kept up."""
        out = []
        if self.machine_share >= BUSY:
            out.append(
                "warning: the client used all its cores and was the bottleneck: send from another machine"
            )
        elif self.busiest >= BUSY:
            out.append(
                f"warning: a client process used {self.busiest:.0%} of a core and was the bottleneck: "
                f"give more than --client-processes {self.processes}"
            )
        if self.late_p99 >= LATE_SECONDS:
            out.append(
                f"warning: requests went out up to {self.late_p99 * 1000:.0f} ms (P99) after their time: the "
                f"load was less than asked for; give more than --client-processes {self.processes}"
            )
        if self.lag_p99 >= LAG_SECONDS and not out:
            out.append(
                f"note: the client's timers came {self.lag_p99 * 1000:.0f} ms late (P99), so latencies are "
                "blurred by as much: its cores are shared with others, perhaps with the server"
            )
        return out


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0
