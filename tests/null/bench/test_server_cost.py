"""The server's page of metrics before and after a run."""

from __future__ import annotations

import pytest

from pegainfer.bench.server_cost import ServerCost, parse

BEFORE = b"""# HELP vllm:host_seconds_total Host time by stage.
# TYPE vllm:host_seconds_total counter
vllm:host_seconds_total{model_name="m",stage="schedule"} 1.5
vllm:host_seconds_total{stage="tokenize",model_name="a{b}"} 2e-05
vllm:step_seconds_count{model_name="m",kind="decode"} 10.0
vllm:step_seconds_sum{model_name="m",kind="decode"} 0.5
vllm:prefix_cache_queries_total{model_name="m"} 100.0
vllm:prefix_cache_hits_total{model_name="m"} 50.0
vllm:other_total{model_name="m"} 3.0
"""
AFTER = BEFORE.replace(b" 1.5", b" 1.75").replace(b" 10.0", b" 14.0").replace(b" 0.5\n", b" 0.75\n")
AFTER = AFTER.replace(b" 100.0", b" 180.0").replace(b" 50.0", b" 70.0")
AFTER += b"""vllm:step_seconds_count{model_name="m",kind="mixed"} 2.0
vllm:step_seconds_sum{model_name="m",kind="mixed"} 0.25
"""


def test_what_a_run_added() -> None:
    cost = ServerCost.between(parse(BEFORE), parse(AFTER))
    assert cost is not None
    assert cost.host_seconds == {"schedule": 0.25, "tokenize": 0.0}
    assert (cost.steps, cost.step_seconds, cost.cached_share) == (6, 0.5, 0.25)
    assert cost.kinds == {"decode": (4, 0.25), "mixed": (2, 0.25)}


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"", b"python_gc_objects 3\n"), (AFTER, BEFORE), (b"", b"<html>\xff</html>")],
    ids=["no page", "another server", "started anew", "no metrics"],
)
def test_where_nothing_can_be_told(before: bytes, after: bytes) -> None:
    assert ServerCost.between(parse(before), parse(after)) is None
