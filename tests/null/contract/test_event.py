"""Errors on their way through events: what is raised behind the engine is what was raised in it."""

from __future__ import annotations

import pytest

from pegainfer.contract.errors import (
    DeadlineError,
    EngineDeadError,
    PegaError,
    QueueFullError,
    RequestError,
    UnsupportedError,
)
from pegainfer.contract.event import FinishReason, TokenEvent, error_events, error_of


@pytest.mark.parametrize(
    "error",
    [
        RequestError("bad", param="top_p", expected=1, got=2),
        QueueFullError("full", retry_after=7.0),
        DeadlineError("late"),
        EngineDeadError("dead", remedy="restart"),
        UnsupportedError("no"),
        PegaError("other"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_error_comes_out_as_it_went_in(error: PegaError) -> None:
    events = error_events("r", range(2), error)
    assert [(e.request_id, e.index, e.finish) for e in events] == [
        ("r", 0, FinishReason.ERROR),
        ("r", 1, FinishReason.ERROR),
    ]
    out = error_of(events[1])
    assert type(out) is type(error) and str(out) == str(error)
    for name in ("param", "retry_after"):
        assert getattr(out, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("kind", [None, "OSError", "InvariantError", "annotations"])
def test_what_names_no_error_of_ours_is_the_root_of_all(kind: str | None) -> None:
    event = TokenEvent(request_id="r", finish=FinishReason.ERROR, error="broken", error_kind=kind)
    out = error_of(event)
    assert type(out) is PegaError and str(out) == "broken"
